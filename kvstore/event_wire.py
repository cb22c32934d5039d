"""KV events as SGLang's current version writes them: what this store's publishers send, and how engines name tiers.

A payload is msgpack ``[published_at, [event, …], dp_rank]``; each event is a map of ``type`` and its fields. Source:
SGLang 0.5.23 ``srt/disaggregation/kv_events.py``. ``engine_adapter.wire_events`` reads this and what other engines and
versions write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kvstore.events import BlocksRemoved, EventBatch, KvEvent, TierCleared
from kvstore.page import Tier

MEDIA: Mapping[str, Tier] = {
    "GPU": Tier.DEVICE,
    "CPU_PINNED": Tier.HOST,
    "CPU": Tier.HOST,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.POOL,
}
"""Media by name, as engines write them."""

MEDIUM_OF_TIER: Mapping[Tier, str] = {
    Tier.DEVICE: "GPU",
    Tier.HOST: "CPU_PINNED",
    Tier.DISK: "DISK",
    Tier.POOL: "EXTERNAL",
}
FLUSHED_TIERS = (Tier.DEVICE, Tier.HOST)
"""What an engine's ``AllBlocksCleared`` covers; its storage keeps its pages."""

_UNSIGNED = 2**64 - 1


def encode_sglang(batch: EventBatch) -> bytes:
    """Encode as SGLang ≥ 0.5.20 does. A clearing of other tiers than SGLang's flush covers names its medium."""
    events = [wire for event in batch.events for wire in _wire(event)]
    return msgspec.msgpack.encode([batch.published_at_s, events, batch.rank])


def _wire(event: KvEvent) -> Iterator[dict[str, object]]:
    if isinstance(event, TierCleared):
        if set(event.tiers) >= set(FLUSHED_TIERS):
            yield {"type": "AllBlocksCleared"}
        rest = [t for t in event.tiers if t not in FLUSHED_TIERS or not set(event.tiers) >= set(FLUSHED_TIERS)]
        for tier in rest:
            yield {"type": "AllBlocksCleared", "medium": MEDIUM_OF_TIER[tier]}
        return
    hashes = [_signed(name) for name in event.hashes]
    medium = MEDIUM_OF_TIER[event.tier]
    if isinstance(event, BlocksRemoved):
        yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        return
    yield {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent is None else _signed(event.parent),
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": medium,
        **({"cache_salt": event.salt} if event.salt else {}),
        **({"lora_name": event.adapter} if event.adapter else {}),
    }


def _signed(name: int) -> int:
    return (name & _UNSIGNED) - ((name & 2**63) << 1)
