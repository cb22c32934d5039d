"""The host tier: one slab of memory, private to the process, taken and touched once when the tier opens."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.codec import checksum
from kvstore.memory import copy_bytes, page_rows
from kvstore.page import PageKey, PageLayout, Tier
from kvstore.policy import EvictionPolicy
from kvstore.tiers.base import OnChange, Page
from kvstore.tiers.slotted import Fault, SlottedTier


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
        verify: bool = True,
    ) -> None:
        """Take memory for as many whole pages as ``capacity_bytes`` holds. Raises ``MediumError``."""
        super().__init__(layout, slots=capacity_bytes // layout.page_bytes, on_change=on_change, policy=policy)
        self._verify = verify
        self._rows = page_rows(self._table.slots, self.page_bytes)
        self._sums = [0] * self._table.slots

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        answers: list[int | Fault] = []
        for slot, out in wanted:
            copy_bytes(out, self._rows[slot])
            good = not self._verify or checksum(out) == self._sums[slot]
            answers.append(self._sums[slot] if good else Fault.CHECKSUM)
        return answers

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        for slot, page in pages:
            copy_bytes(self._rows[slot], page.data)
            self._sums[slot] = page.checksum
        return [True] * len(pages)
