"""What a model folder's weights are: what identifies them, and how they become a model."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from engine_adapter.embedded.config import ModelConfig
from engine_adapter.embedded.errors import ModelError
from engine_adapter.embedded.folders import sha256_of
from engine_adapter.embedded.model import LlamaModel


def weights_id(model_dir: Path) -> str:
    """Return a digest (32 hex digits) of everything in the folder that the KV bytes depend on: tensors and shape.

    O(bytes of the weights) once; then remembered beside the folder until a file's size or time changes.
    """
    files = _tensor_files(model_dir)
    stamp = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    shape = json.dumps(asdict(ModelConfig.load(model_dir)), sort_keys=True)
    memo = model_dir.with_name(f".{model_dir.name}.weights-id.json")
    try:
        known = json.loads(memo.read_text())
        if known["files"] == stamp and known["shape"] == shape:
            return str(known["id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no memo, or not ours: compute
    digest = hashlib.sha256(shape.encode())
    for path in files:
        digest.update(bytes.fromhex(sha256_of(path)))
    identity = digest.hexdigest()[:32]
    try:
        scratch = memo.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"files": stamp, "shape": shape, "id": identity}))
        scratch.replace(memo)
    except OSError:
        pass  # a folder beside which we may not write is hashed each time
    return identity


def load_model(model_dir: Path, dtype: torch.dtype | None = None, device: str = "cpu") -> LlamaModel:
    """Read the safetensors of a folder into a model on ``device``; ``dtype`` defaults to float32 on CPU, bfloat16 else.

    Raises ``ModelError`` for an unsupported architecture, or tensors that are missing or misshapen.
    """
    from safetensors import safe_open

    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    config = ModelConfig.load(model_dir)
    tensors: dict[str, torch.Tensor] = {}
    for path in _tensor_files(model_dir):
        with safe_open(path, framework="pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensors[name] = file.get_tensor(name).to(dtype)
    return LlamaModel(config, tensors)


def _tensor_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [model_dir / name for name in names]
        else:
            files = [model_dir / "model.safetensors"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{index}: {error!r}") from error
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} does not exist; only safetensors are loaded")
    return files
