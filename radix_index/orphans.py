"""Blocks whose parent is not known yet: parked, bounded, until the parent is announced.

They appear when a gateway starts to listen in the middle of an engine's life, or after events were lost. They are never
counted as held before their parent is known.

An engine under pressure removes many blocks a second while thousands of chains wait, so a removal is only noted; it
cuts a chain when that chain is claimed, or when so much was noted that going through all of them costs no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from kvstore.events import BlocksStored
from kvstore.page import Tier

ORPHAN_BLOCK_LIMIT = 65_536

ParentKey = tuple[str | None, int]  # adapter and the source's name of the parent
_FEW = 1024  # removals that may always be noted


@dataclass(slots=True)
class OrphanRoom:
    """How many blocks may wait, over all sources that share it."""

    block_limit: int = ORPHAN_BLOCK_LIMIT
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Parked:
    event: BlocksStored
    moment: int  # removals that were noted later count


class Orphans:
    """One source's chains that wait for their parents, its oldest dropped first when the room is full."""

    def __init__(self, room: OrphanRoom | None = None) -> None:
        self.room = room or OrphanRoom()
        self.blocks = 0
        """Of this source; what was cut off by removals counts until the chain is claimed or gone through."""
        self.dropped_blocks = 0
        self._waiting: OrderedDict[ParentKey, list[_Parked]] = OrderedDict()
        self._removed: dict[Tier, dict[int, int]] = {}  # the moment of each name's last removal
        self._moment = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def park(self, event: BlocksStored) -> None:
        """Keep ``event`` until its parent comes. Raises ``ValueError`` for an event without a parent."""
        if event.parent is None:
            raise ValueError("a first block has no parent to wait for")
        self._moment += 1
        waiting = self._waiting.setdefault((event.adapter, event.parent), [])
        position = next((i for i, parked in enumerate(waiting) if parked.event == event), None)
        if position is None:
            waiting.append(_Parked(event, self._moment))
            self._count(len(event.hashes))
        else:
            waiting[position] = _Parked(event, self._moment)
        while self.room.blocks > self.room.block_limit and self._waiting:
            _, dropped = self._waiting.popitem(last=False)
            lost = sum(len(parked.event.hashes) for parked in dropped)
            self._count(-lost)
            self.dropped_blocks += lost

    def claim(self, adapter: str | None, names: Iterable[int]) -> list[BlocksStored]:
        """Hand out, and stop keeping, what is left of the chains whose parent is one of ``names``."""
        found = [parked for name in names for parked in self._waiting.pop((adapter, name), [])]
        self._count(-sum(len(parked.event.hashes) for parked in found))
        left = [event for parked in found if (event := self._left(parked)) is not None]
        if not self._waiting:
            self._removed.clear()
        return left

    def remove(self, names: Iterable[int], tier: Tier) -> None:
        """Cut each parked chain of ``tier`` before the first of ``names``. O(names), amortized."""
        self._moment += 1
        self._removed.setdefault(tier, {}).update(dict.fromkeys(names, self._moment))
        if sum(map(len, self._removed.values())) > max(self.blocks, _FEW):
            self._rewrite(self._left)
            self._removed.clear()

    def clear(self, tiers: Iterable[Tier]) -> None:
        """Forget what is parked for ``tiers``. O(parked chains)."""
        gone = set(tiers)
        self._rewrite(lambda parked: None if parked.event.tier in gone else parked.event)
        if not self._waiting:
            self._removed.clear()

    def _rewrite(self, change: Callable[[_Parked], BlocksStored | None]) -> None:
        kept = {
            key: [_Parked(new, parked.moment) for parked in waiting if (new := change(parked)) is not None]
            for key, waiting in self._waiting.items()
        }
        self._waiting = OrderedDict((key, waiting) for key, waiting in kept.items() if waiting)
        blocks = sum(len(parked.event.hashes) for waiting in self._waiting.values() for parked in waiting)
        self._count(blocks - self.blocks)

    def _count(self, more: int) -> None:
        self.blocks += more
        self.room.blocks += more

    def _left(self, parked: _Parked) -> BlocksStored | None:
        """Return what removals have left of a chain."""
        event, gone = parked.event, self._removed.get(parked.event.tier, {})
        if gone.keys().isdisjoint(event.hashes):
            return event
        later = (position for position, name in enumerate(event.hashes) if gone.get(name, 0) > parked.moment)
        length = next(later, len(event.hashes))
        if length == len(event.hashes):
            return event
        tokens = event.token_ids[: length * event.block_size]
        return replace(event, hashes=event.hashes[:length], token_ids=tokens) if length else None
