"""Which blocks all ranks of an engine can load, by tier: the scheduler's picture of what its workers' stores hold.

A block is usable when every rank has its part of it. Pure; O(1) a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.page import Tier
from kvstore.plugins.vllm.messages import Change, Removed, Stored

LOCAL_TIERS = (Tier.HOST, Tier.DISK)
"""Tiers of which the workers tell every change. The pool is others' too: what is there, it must be asked."""


class Holdings:
    """Which ranks have which block in which tier."""

    def __init__(self, ranks: int) -> None:
        self._whole = (1 << ranks) - 1
        self._masks: dict[Tier, dict[bytes, int]] = {tier: {} for tier in Tier}

    def apply(self, rank: int, changes: Iterable[Change]) -> list[Change]:
        """Fold one rank's changes; return those that change what all ranks have together."""
        told: list[Change] = []
        for change in changes:
            masks = self._masks[change.tier]
            if isinstance(change, Stored):
                pages = tuple(page for page in change.pages if self._add(masks, page[0], rank))
                if pages:
                    told.append(Stored(change.tier, pages))
            else:
                gone = tuple(name for name in change.hashes if self._take(masks, name, rank))
                if gone:
                    told.append(Removed(change.tier, gone))
        return told

    def tier_of(self, name: bytes) -> Tier | None:
        """Return the tier of the engine's own that the block comes from, the slowest of its ranks deciding."""
        mask = 0
        for tier in LOCAL_TIERS:
            mask |= self._masks[tier].get(name, 0)
            if mask == self._whole:
                return tier
        return None

    def has(self, name: bytes) -> bool:
        """Tell whether every rank has stored the block somewhere, as far as is known."""
        return any(masks.get(name) == self._whole for masks in self._masks.values())

    def some_of(self, tier: Tier, count: int) -> Sequence[bytes]:
        """Return a few blocks of a tier, those that were stored first."""
        names = []
        for name, mask in self._masks[tier].items():
            if mask == self._whole:
                names.append(name)
                if len(names) == count:
                    break
        return names

    def _add(self, masks: dict[bytes, int], name: bytes, rank: int) -> bool:
        before = masks.get(name, 0)
        after = masks[name] = before | (1 << rank)
        return after == self._whole != before

    def _take(self, masks: dict[bytes, int], name: bytes, rank: int) -> bool:
        before = masks.pop(name, 0)
        after = before & ~(1 << rank)
        if after:
            masks[name] = after
        return before == self._whole != after
