"""The host tier: one slab of memory, private to the process, taken and touched once when the tier opens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstore.codec import checksum
from kvstore.memory import ByteRows, copy_and_hash, copy_bytes, page_rows
from kvstore.page import PageKey, PageLayout, Tier
from kvstore.policy import EvictionPolicy
from kvstore.retention import RetentionRules
from kvstore.tiers.base import Found, NewPage, OnChange, Page, PageTier
from kvstore.tiers.slotted import Fault, SlottedTier

TakeRows = Callable[[Sequence[int], Sequence[memoryview]], object]
"""Is given the places of pages among those that were asked for, and each as it lies, valid during the call only."""

FillRows = Callable[[Sequence[int], Sequence[memoryview]], Sequence[int | None]]
"""Is given the places of pages among those to store, and where each is to be written; returns the checksum of each,
``None`` for one that was not written."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Pages in the host tier's own memory, pinned there."""

    pages: list[Page]
    slots: list[int]


@runtime_checkable
class LendingTier(PageTier, Protocol):
    """A tier in memory, whose pages others may read as they lie: what a ``PageStore`` writes behind from."""

    def lend(self, keys: Sequence[PageKey]) -> Loan:
        """Give those pages that are here as they lie, to be read until they are taken back; they stay that long."""

    def take_back(self, loan: Loan) -> None:
        """End a loan. Once."""


@runtime_checkable
class InPlaceTier(LendingTier, Protocol):
    """A tier in memory that this process alone writes to, so that what was verified stays as it is: pages may be read
    and written where they lie, without a buffer between."""

    @property
    def memory(self) -> ByteRows:
        """All of it: (slots, page_bytes), as long as the tier lives."""

    def get_in_place(self, keys: Sequence[PageKey], take: TakeRows) -> list[Found | None]:
        """Do ``get`` without copying: ``take`` is called once with what is here and verified, if anything is."""

    def put_in_place(self, pages: Sequence[NewPage], fill: FillRows) -> list[bool]:
        """Do ``put`` without copying: ``fill`` is called once with the pages that are new here and have room, if any
        are."""


class HostTier(SlottedTier):
    """Pages in memory. A hit costs one copy, and with ``verify`` a hash of the page while it is hot in cache."""

    tier = Tier.HOST

    def __init__(
        self,
        layout: PageLayout,
        *,
        capacity_bytes: int,
        on_change: OnChange | None = None,
        policy: EvictionPolicy[PageKey] | None = None,
        retention: RetentionRules | None = None,
        clock: Callable[[], float] = time.time,
        verify: bool = True,
    ) -> None:
        """Take memory for as many whole pages as ``capacity_bytes`` holds. Raises ``MediumError``."""
        super().__init__(
            layout,
            slots=capacity_bytes // layout.page_bytes,
            on_change=on_change,
            policy=policy,
            retention=retention,
            clock=clock,
        )
        self._verify = verify
        self._rows = page_rows(self._table.slots, self.page_bytes)
        self._views = [memoryview(row) for row in self._rows]
        self._sums = [0] * self._table.slots

    def lend(self, keys: Sequence[PageKey]) -> Loan:
        """Give those pages that are here as they lie, to be read until they are taken back; they stay that long."""
        slots, pages = [], []
        with self._lock:
            for key in keys:
                for slot in self._table.acquire([key], wanted=False):
                    expires_at_s = self._table.expires_at_s(key)
                    pages.append(Page(key, self._table.meta(slot), self._views[slot], self._sums[slot], expires_at_s))
                    slots.append(slot)
        return Loan(pages, slots)

    def take_back(self, loan: Loan) -> None:
        """End a loan. Once."""
        with self._lock:
            self._table.release(loan.slots)

    @property
    def memory(self) -> ByteRows:
        """See ``InPlaceTier``."""
        return self._rows

    def get_in_place(self, keys: Sequence[PageKey], take: TakeRows) -> list[Found | None]:
        """See ``InPlaceTier``. Costs a hash of each page, with ``verify``."""

        def read(places: Sequence[int], slots: Sequence[int]) -> list[int | Fault]:
            answers = [self._verified(slot) for slot in slots]
            good = [
                (place, self._views[slot])
                for place, slot, answer in zip(places, slots, answers, strict=True)
                if not isinstance(answer, Fault)
            ]
            if good:
                take([place for place, _ in good], [row for _, row in good])
            return answers

        return self._get(keys, read)

    def put_in_place(self, pages: Sequence[NewPage], fill: FillRows) -> list[bool]:
        """See ``InPlaceTier``. One writer at a time, so ``fill`` should wait for nothing but its copies."""
        place_of = {page.key: place for place, page in enumerate(pages)}

        def write(jobs: list[tuple[int, NewPage]]) -> list[tuple[int, Page]]:
            rows = [self._views[slot] for slot, _ in jobs]
            sums = fill([place_of[page.key] for _, page in jobs], rows) if jobs else []
            written = []
            for (slot, page), row, one in zip(jobs, rows, sums, strict=True):
                if one is not None:
                    self._sums[slot] = one
                    written.append((slot, Page(page.key, page.meta, row, one)))
            return written

        return self._put(pages, write)

    def _verified(self, slot: int) -> int | Fault:
        known = self._sums[slot]
        return known if not self._verify or checksum(self._views[slot]) == known else Fault.CHECKSUM

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        rows, sums = self._views, self._sums
        if not self._verify:
            for slot, out in wanted:
                copy_bytes(out, rows[slot])
            return [sums[slot] for slot, _ in wanted]
        found = copy_and_hash([out for _, out in wanted], [rows[slot] for slot, _ in wanted])
        return [
            sums[slot] if sums[slot] == one else Fault.CHECKSUM for (slot, _), one in zip(wanted, found, strict=True)
        ]

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        found = copy_and_hash([self._views[slot] for slot, _ in pages], [page.data for _, page in pages])
        for (slot, _), one in zip(pages, found, strict=True):
            self._sums[slot] = one
        return [one == page.checksum for (_, page), one in zip(pages, found, strict=True)]
