from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.plugins.weights import weights_digest


def model(folder: Path, weights: bytes = b"w" * 10_000, config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text(folder.name)
    return folder


def test_the_same_files_are_the_same_weights_wherever_they_lie(tmp_path: Path) -> None:
    assert weights_digest(model(tmp_path / "a")) == weights_digest(model(tmp_path / "b"))


@pytest.mark.parametrize("place", [0, 5_000, 9_999])
def test_any_byte_makes_other_weights(tmp_path: Path, place: int) -> None:
    changed = bytearray(b"w" * 10_000)
    changed[place] ^= 1
    assert weights_digest(model(tmp_path / "a")) != weights_digest(model(tmp_path / "b", bytes(changed)))


def test_another_configuration_makes_other_weights(tmp_path: Path) -> None:
    other = model(tmp_path / "b", config='{"rope_theta": 1}')
    assert weights_digest(model(tmp_path / "a")) != weights_digest(other)


def test_a_digest_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    folder, memo = model(tmp_path / "a"), tmp_path / "deep" / "memo.json"
    first = weights_digest(folder, memo)
    stat = (folder / "model.safetensors").stat()
    (folder / "model.safetensors").write_bytes(b"v" * 10_000)
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_digest(folder, memo) == first, "same size and time: believed"
    os.utime(folder / "model.safetensors", ns=(1, 1))
    second = weights_digest(folder, memo)
    assert second != first
    assert weights_digest(folder, memo) == second


@pytest.mark.parametrize("content", ["", "{", "7", '[{"files": 1}]'])
def test_an_unreadable_memo_is_ignored(tmp_path: Path, content: str) -> None:
    folder, memo = model(tmp_path / "a"), tmp_path / "memo.json"
    memo.write_text(content)
    assert weights_digest(folder, memo) == weights_digest(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights"):
        weights_digest(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        weights_digest(tmp_path / "nowhere")
