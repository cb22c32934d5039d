"""The one vocabulary of KV events: what an engine or a store says about the blocks that it holds.

Engines' own frames (``engine_adapter.wire_events``) and our tiers' changes both become these values; the index folds
them in order of sequence numbers. ``hashes`` are the source's own names for its blocks; the index translates them by
``token_ids``, so that any hash function of any engine will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.page import Tier


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks became readable in ``tier``. ``len(token_ids) == len(hashes) * block_size``."""

    hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_size: int
    tier: Tier
    salt: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks are no longer readable in ``tier``."""

    hashes: Sequence[int]
    tier: Tier


@dataclass(frozen=True, slots=True)
class TierCleared:
    """Nothing is readable any more in ``tiers`` (an engine's flush covers its device and host)."""

    tiers: tuple[Tier, ...]


KvEvent = BlocksStored | BlocksRemoved | TierCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What a source published at once. ``sequence`` starts at 0 in every life of the publisher and grows by one."""

    sequence: int
    published_at_s: float
    events: tuple[KvEvent, ...]
    rank: int = 0
    ignored: tuple[str, ...] = ()  # why events that the source sent are missing here, one reason each
