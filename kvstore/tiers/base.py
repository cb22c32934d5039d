"""The contract that every tier keeps, and which ``tests/contract/test_tiers.py`` holds all four to.

* A tier maps ``PageKey`` to exactly ``page_bytes`` bytes. It keeps at most ``capacity_bytes`` of pages, exactly.
* ``get`` fills the caller's buffer or reports a miss. A page whose key, length or checksum does not verify is a miss
  and a counted alarm, never bytes. A buffer that was not filled has unspecified content.
* ``put`` publishes a page only after its last byte is written; a reader never sees half of one. It deduplicates.
* A fault of the medium (full, slow, gone, read-only) is a miss on ``get`` and ``False`` on ``put``; it is counted,
  logged once for each change of state, and never raised. ``ValueError`` is for programmer errors (a buffer of the
  wrong size).
* Methods are synchronous, thread-safe and bounded by the tier's deadline. They are called off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from kvstore.latency import LatencyHistogram
from kvstore.page import Namespace, PageKey, PageMeta, Tier

PIN_S = 600.0
"""How long a pin lasts whose owner does not say and does not come back for it."""


class Page(msgspec.Struct, frozen=True, gc=False):
    """One page on its way into a tier. ``data`` is valid during the call only; ``checksum`` is xxh3_64 of ``data``."""

    key: PageKey
    meta: PageMeta
    data: memoryview
    checksum: int
    expires_at_s: int = 0  # of the wall clock; 0: as the tier's own rule says


class NewPage(msgspec.Struct, frozen=True, gc=False):
    """One page whose bytes are still to be written to where a tier keeps it."""

    key: PageKey
    meta: PageMeta


class Found(msgspec.Struct, frozen=True, gc=False):
    """What a tier says of a page whose bytes it has just delivered and verified."""

    checksum: int
    meta: PageMeta
    expires_at_s: int = 0  # of the wall clock; 0: never


@dataclass(frozen=True, slots=True)
class PagesStored:
    """These pages became readable in ``tier``."""

    tier: Tier
    pages: tuple[tuple[PageKey, PageMeta], ...]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """These pages were evicted from, or removed in, ``tier``."""

    tier: Tier
    keys: tuple[PageKey, ...]


TierChange = PagesStored | PagesRemoved
OnChange = Callable[[TierChange], None]


@dataclass(slots=True)
class TierStats:
    """Counters of one tier since it was opened; ``misses`` and ``alarms`` are by reason."""

    hits: int = 0
    puts: int = 0
    evictions: int = 0
    dropped: int = 0
    used_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)
    get_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    put_latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    def miss(self, reason: str, count: int = 1) -> None:
        """Count pages that were asked for and not delivered."""
        if count:
            self.misses[reason] = self.misses.get(reason, 0) + count

    def alarm(self, reason: str, count: int = 1) -> None:
        """Count pages that did not verify; every alarm of a read is also a miss."""
        if count:
            self.alarms[reason] = self.alarms.get(reason, 0) + count

    def copy(self) -> TierStats:
        """Return a snapshot that later counting does not change."""
        return replace(
            self,
            misses=dict(self.misses),
            alarms=dict(self.alarms),
            get_latency=self.get_latency.copy(),
            put_latency=self.put_latency.copy(),
        )


class PageTier(Protocol):
    """One level of the store."""

    on_change: OnChange | None
    """Told of every change, in order, from whichever thread made it, with no lock of the tier held."""

    @property
    def tier(self) -> Tier:
        """Which level this is."""

    @property
    def page_bytes(self) -> int:
        """The length of every page."""

    @property
    def capacity_bytes(self) -> int:
        """The most bytes of pages that the tier ever holds."""

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """Tell for each key whether ``get`` would probably find it. No page bytes are read."""

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        """Fill ``out[i]`` with the page of ``keys[i]`` and say what it is, or ``None`` for a miss."""

    def put(self, pages: Sequence[Page]) -> list[bool]:
        """Store the pages; ``True`` for each that is readable afterwards, whether new or already there."""

    def remove(self, keys: Sequence[PageKey]) -> int:
        """Forget the pages; return how many were there."""

    def forget(self, namespace: Namespace) -> int:
        """Forget every page of a namespace, as when its weights or its tenant go; return how many were there."""

    def pin(self, keys: Sequence[PageKey], *, for_s: float = PIN_S) -> list[bool]:
        """Protect pages from eviction until ``unpin``, counted; ``False`` where there is no such page.

        After ``for_s`` a pin ends by itself: an owner that died keeps nothing.
        """

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Release one pin of each page, of several the one that would have ended first."""

    def retire(self, keys: Sequence[PageKey]) -> None:
        """The run that these pages belong to has ended: they go before all others. They stay readable until then."""

    def scan(self) -> Iterator[tuple[PageKey, PageMeta]]:
        """Go through what the tier holds, parents before children where it can."""

    def announce(self, limit: int) -> int:
        """Tell ``on_change`` again of what the tier holds, at most ``limit`` pages, oldest first; return how many."""

    def clear(self) -> None:
        """Forget every page of this tier's own namespace."""

    def stats(self) -> TierStats:
        """Return a copy of the counters."""

    def check(self) -> None:
        """Verify every internal invariant; raises ``AssertionError``. For tests and ``keepwarm store verify``."""

    def close(self) -> None:
        """Flush what was accepted and release the medium. Idempotent."""
