"""What SGLang's arguments tell of our storage plug-in: where its one stream of events is, and which pool it shares.

The plug-in (``kvstore.plugins.sglang``) hands the engine's own events on together with what it says of disk and pool;
so where it publishes, that stream stands in the place of the engine's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from engine_adapter.base import EventSource, mapping

_MODULE = "kvstore.plugins.sglang"
_TOPIC = "kv-events"
_PAGES_DEPEND_ON = (
    "version",
    "served_model_name",
    "model_path",
    "revision",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "json_model_override_args",
    "page_size",
    "tp_size",
    "pp_size",
    "hicache_mem_layout",
)
"""Arguments that make pages differ; the plug-in's own fingerprint also covers the weights."""


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """``pool``: a name that servers share exactly when they can read one another's pages, as far as arguments tell."""

    pool: str | None
    tiers: tuple[str, ...]
    port: int | None  # of the first rank's events; the port after it replays


def storage_facts(info: Mapping[str, object]) -> StorageFacts | None:
    """Read ``/server_info``; ``None`` where the storage is none of ours."""
    if info.get("hicache_storage_backend") != "dynamic":
        return None
    told = info.get("hicache_storage_backend_extra_config")
    if not isinstance(told, str):
        return None
    try:
        config = mapping(json.loads(told))  # a file that is named here (@…) is on the engine's machine
    except ValueError:
        return None
    if config is None or not str(config.get("module_path", "")).startswith(_MODULE):
        return None
    tiers = ["device", "host"]
    if config.get("disk"):
        tiers.append("disk")
    pool = config.get("pool")
    events = str(config.get("events") or "")
    port = events.rpartition(":")[2]
    return StorageFacts(
        pool=_pool_name(str(pool), config, info) if pool else None,
        tiers=tuple(tiers),
        port=int(port) if port.isdecimal() else None,
    )


def relayed(sources: tuple[EventSource, ...], port: int, host: str) -> tuple[EventSource, ...]:
    """Return where the plug-in of each rank publishes, in the place of the engine's own sources."""
    return tuple(
        EventSource(
            endpoint=f"tcp://{host}:{port + 2 * source.rank}",
            replay_endpoint=f"tcp://{host}:{port + 2 * source.rank + 1}",
            topic=_TOPIC,
            rank=source.rank,
        )
        for source in sources
    )


def _pool_name(url: str, config: Mapping[str, object], info: Mapping[str, object]) -> str:
    """Return a digest of the pool's name or its place without credentials, and of what pages depend on."""
    place = config.get("pool_name") or url.rpartition("@")[2]
    named = [place, config.get("namespace"), config.get("weights_id"), bool(config.get("interface_v1"))]
    described = json.dumps([named, [str(info.get(name)) for name in _PAGES_DEPEND_ON]])
    return f"sglang-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
