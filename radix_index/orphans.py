"""Blocks whose parent is not known yet: parked, bounded, until the parent is announced.

They appear when a gateway starts to listen in the middle of an engine's life, or after events were lost. They are never
counted as held before their parent is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from kvstore.events import BlocksStored
from kvstore.page import Tier

ParentKey = tuple[str | None, int]  # adapter and the source's name of the parent
_Change = Callable[[BlocksStored], BlocksStored | None]


class Orphans:
    """Chains waiting for their parents, oldest dropped first once there are more than ``block_limit`` blocks."""

    def __init__(self, block_limit: int) -> None:
        self.block_limit = block_limit
        self.blocks = 0
        self.dropped_blocks = 0
        self._waiting: OrderedDict[ParentKey, list[BlocksStored]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def park(self, event: BlocksStored) -> None:
        """Keep ``event`` until its parent comes. Raises ``ValueError`` for an event without a parent."""
        if event.parent is None:
            raise ValueError("a first block has no parent to wait for")
        waiting = self._waiting.setdefault((event.adapter, event.parent), [])
        if event not in waiting:
            waiting.append(event)
            self.blocks += len(event.hashes)
        while self.blocks > self.block_limit:
            _, dropped = self._waiting.popitem(last=False)
            self._forget(dropped)

    def _forget(self, events: Iterable[BlocksStored]) -> None:
        lost = sum(len(event.hashes) for event in events)
        self.blocks -= lost
        self.dropped_blocks += lost

    def claim(self, adapter: str | None, names: Iterable[int]) -> list[BlocksStored]:
        """Hand out, and stop keeping, the chains whose parent is one of ``names``."""
        found = [event for name in names for event in self._waiting.pop((adapter, name), [])]
        self.blocks -= sum(len(event.hashes) for event in found)
        return found

    def remove(self, names: Iterable[int], tier: Tier) -> None:
        """Cut each parked chain of ``tier`` before the first of ``names``. O(parked blocks)."""
        gone = set(names)
        self._rewrite(lambda event: _cut(event, gone) if event.tier is tier else event)

    def clear(self, tiers: Iterable[Tier]) -> None:
        """Forget what is parked for ``tiers``."""
        gone = set(tiers)
        self._rewrite(lambda event: None if event.tier in gone else event)

    def _rewrite(self, change: _Change) -> None:
        kept = {key: [new for event in events if (new := change(event))] for key, events in self._waiting.items()}
        self._waiting = OrderedDict((key, events) for key, events in kept.items() if events)
        self.blocks = sum(len(event.hashes) for events in self._waiting.values() for event in events)


def _cut(event: BlocksStored, gone: set[int]) -> BlocksStored | None:
    length = next((i for i, name in enumerate(event.hashes) if name in gone), len(event.hashes))
    if length == len(event.hashes):
        return event
    tokens = event.token_ids[: length * event.block_size]
    return replace(event, hashes=event.hashes[:length], token_ids=tokens) if length else None
