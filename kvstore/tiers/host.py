"""The host tier: one slab of memory, private to the process, taken and touched once when the tier opens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstore.memory import copy_and_hash, copy_bytes, page_rows
from kvstore.page import PageKey, PageLayout, Tier
from kvstore.policy import EvictionPolicy
from kvstore.retention import RetentionRules
from kvstore.tiers.base import OnChange, Page, PageTier
from kvstore.tiers.slotted import Fault, SlottedTier


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
