"""The one vocabulary of KV events: what an engine or a store says about the blocks that it holds.

Engines' own frames (``engine_adapter.wire_events``) and our tiers' changes both become these values; the index folds
them in order of sequence numbers. ``hashes`` are the source's own names for its blocks; the index translates them by
``token_ids``, so that any hash function of any engine will do. Sequences of numbers may be tuples or ``array``s: making
a Python integer of every token would be most of what an event costs, so the decoder doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.page import Tier


class BlocksStored(msgspec.Struct, frozen=True):
    """A chain of blocks became readable in ``tier``. ``len(token_ids) == len(hashes) * block_size``."""

    hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_size: int
    tier: Tier
    salt: str | None = None
    adapter: str | None = None


class BlocksRemoved(msgspec.Struct, frozen=True):
    """These blocks are no longer readable in ``tier``."""

    hashes: Sequence[int]
    tier: Tier


class TierCleared(msgspec.Struct, frozen=True):
    """Nothing is readable any more in ``tiers`` (an engine's flush covers its device and host)."""

    tiers: tuple[Tier, ...]


KvEvent = BlocksStored | BlocksRemoved | TierCleared


class EventBatch(msgspec.Struct, frozen=True):
    """What a source published at once. ``sequence`` starts at 0 in every life of the publisher and grows by one."""

    sequence: int
    published_at_s: float
    events: tuple[KvEvent, ...]
    rank: int = 0
    ignored: tuple[str, ...] = ()  # why events that the source sent are missing here, one reason each
