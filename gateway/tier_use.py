"""Whether an instance takes pages out of its slower tiers, as its answers tell. Pure.

What lies in a tier is known from events. Whether an engine's store fetches it is the store's own decision, by rates
that it alone has measured: a pool that has become slow is full of pages that nobody reads. So what was expected of each
tier is held against the hits that answers report, and where most of it was computed again, nothing is expected of that
tier until answers tell of hits there once more.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracing.record import HitSource, Usage, UsageSource

Hits = tuple[int, int, int, int]
"""Tokens by tier: device, host, disk, pool."""

_NEW, _TAKEN = 0.25, 0.5


class TierUse:
    """One instance's habit."""

    __slots__ = ("_shares", "refuses")

    def __init__(self) -> None:
        self._shares = [1.0, 1.0, 1.0, 1.0]
        self.refuses = False  # anything at all

    def refused(self) -> tuple[int, ...]:
        """Return the tiers of which nothing is expected now."""
        return tuple(tier for tier, share in enumerate(self._shares) if share < _TAKEN)

    def taken(self, hits: Hits) -> Hits:
        """Return what may be expected of these hits."""
        if not self.refuses:
            return hits
        device, *slower = (hit if share >= _TAKEN else 0 for hit, share in zip(hits, self._shares, strict=True))
        host, disk, pool = slower
        return device, host, disk, pool

    def saw(self, held: Sequence[int], usage: Usage) -> None:
        """Hold what lay in each tier against an answer. One that does not count its hits says nothing.

        Hits are taken to be those of the fastest tiers, since pages move up, and engines may tell a total only.
        """
        if usage.source is not UsageSource.ENGINE or usage.hit_source is HitSource.UNKNOWN or not any(held[1:]):
            return
        left = usage.hit_tokens - min(usage.hit_tokens, held[0])
        for tier in range(1, 4):
            if held[tier]:
                used = min(left, held[tier])
                left -= used
                self._shares[tier] += _NEW * (used / held[tier] - self._shares[tier])
        self.refuses = min(self._shares[1:]) < _TAKEN
