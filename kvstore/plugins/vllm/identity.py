"""Whose pages are whose: everything that the bytes of a page depend on, as one fingerprint.

vLLM's block hashes name tokens, salt, adapter and media of a block, and nothing else; two servers of which anything
below differs must never exchange a page.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvstore.page import PageLayout
from kvstore.plugins.vllm.paged_cache import PagedCache
from kvstore.plugins.weights import weights_digest

PLUGIN_FORMAT = 1
"""Bump it when the order of a page's pieces changes."""

CONTENT_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Algorithms by which no two blocks of different tokens have one name."""

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"})


def page_layout(cache: PagedCache, vllm_config: Any, *, weights_id: str, namespace: str, version: str) -> PageLayout:
    """Return the layout of this rank's pages.

    The store need not know what is in a page: it is ``page_bytes`` bytes, and ``order`` says all that they depend on.
    Versions of vLLM are told apart to the minor number, since what stands in a block is theirs to change.
    """
    model, caching, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    tokens = caching.block_size if cache.page_bytes % caching.block_size == 0 else 1
    described = {
        "plugin": PLUGIN_FORMAT,
        "engine": f"vllm {'.'.join(version.split('.')[:2])}",
        "namespace": namespace,
        "model": _served_name(model),
        "config": _config_of(model.hf_config),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(caching.cache_dtype),
        "quantization": str(model.quantization),
        "block_tokens": caching.block_size,
        "layers": cache.shapes,
        "device": _device(cache.device),
        "pp": [getattr(parallel, "pipeline_parallel_size", 1)],
        "cp": [
            getattr(parallel, "prefill_context_parallel_size", 1),
            getattr(parallel, "decode_context_parallel_size", 1),
        ],
    }
    return PageLayout(
        weights_id=weights_id,
        dtype="uint8",
        page_tokens=tokens,
        layers=1,
        kv_heads=1,
        head_dim=cache.page_bytes // tokens,
        order=json.dumps(described, sort_keys=True, default=str),
        rank=parallel.rank,
        ranks=parallel.world_size,
        is_mla=True,
    )


def weights_of(model: str, revision: str | None, memo: Path | None) -> str:
    """Return the digest of a model's files, given as a folder or as a name on the Hugging Face hub.

    Raises ``ValueError`` where there are none on this machine.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError) as error:
            raise ValueError(f"keepwarm cannot find the files of {model}: name its 'weights_id'") from error
    try:
        return weights_digest(folder, memo)
    except OSError as error:
        raise ValueError(f"keepwarm cannot read the weights in {folder}: {error}") from error


def _served_name(model: Any) -> str:
    name = model.served_model_name
    return str(name[0] if isinstance(name, list) and name else name)


def _config_of(hf_config: Any) -> Mapping[str, object]:
    """Return the model's configuration as the server runs it, its overrides included."""
    return {name: value for name, value in hf_config.to_dict().items() if name not in _VOLATILE}


def _device(device: torch.device) -> str:
    """Return what decides how a kernel arranges a block's content: on CPUs that is their instruction set."""
    if device.type != "cpu":
        return device.type
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
