"""What vLLM's own configuration tells of our connector: which tiers its events speak of, and which pool it shares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from engine_adapter.base import mapping

_MODULE = "kvstore.plugins.vllm"
_PAGES_DEPEND_ON = ("model", "served_model_name", "revision", "dtype", "quantization")
"""Of the model's configuration; the connector's own fingerprint also covers the weights."""


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """``pool``: a name that servers share exactly when they can read one another's pages, as far as this tells."""

    pool: str | None = None
    tiers: tuple[str, ...] = ("device",)


def storage_facts(config: Mapping[str, object]) -> StorageFacts:
    """Read a server's ``VllmConfig``; nothing but a device where its connector is none of ours."""
    transfer = mapping(config.get("kv_transfer_config")) or {}
    if not str(transfer.get("kv_connector_module_path") or "").startswith(_MODULE):
        return StorageFacts()
    extra = mapping(transfer.get("kv_connector_extra_config")) or {}
    tiers = ("device", "host", "disk") if extra.get("disk") else ("device", "host")
    pool = extra.get("pool")
    return StorageFacts(_pool_name(str(pool), extra, config) if pool else None, tiers)


def _pool_name(url: str, extra: Mapping[str, object], config: Mapping[str, object]) -> str:
    """Return a digest of the pool's place, without credentials, and of what pages depend on."""
    model = mapping(config.get("model_config")) or {}
    cache = mapping(config.get("cache_config")) or {}
    parallel = mapping(config.get("parallel_config")) or {}
    described = [
        url.rpartition("@")[2],
        [str(extra.get(name)) for name in ("namespace", "weights_id")],
        [str(model.get(name)) for name in _PAGES_DEPEND_ON],
        [str(cache.get(name)) for name in ("block_size", "cache_dtype", "prefix_caching_hash_algo")],
        [str(parallel.get(name)) for name in ("tensor_parallel_size", "pipeline_parallel_size")],
    ]
    return f"vllm-{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]}"
