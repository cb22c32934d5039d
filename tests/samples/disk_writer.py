"""A process that writes pages to a disk tier until it kills itself in the middle of a write.

Usage: python -m tests.samples.disk_writer FOLDER PAGES_OF_CAPACITY STAGE BATCH. It writes batch after batch of first
pages, one more than half of the tier each, so that slots are reused; in batch BATCH it dies at STAGE. After each batch
it prints the number of the batch: what is printed was stored.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.page import PageKey
from kvstore.tiers.base import Page
from kvstore.tiers.disk import DiskOptions, DiskTier
from tests.samples.pages import LAYOUT, page, strangers

STAGES = ("before the bytes", "between two pages", "within a page", "after the bytes", "after the record")


def batch_pages(capacity_pages: int, number: int) -> list[Page]:
    """Return the pages of one batch."""
    size = capacity_pages // 2 + 1
    return [page(entry) for entry in strangers(size, first_token=1000 * size * number)]


def die() -> None:
    """End as by power loss of the process: nothing is flushed, closed or unwound."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingTier(DiskTier):
    """A disk tier that dies at one stage of one write."""

    stage = ""

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        if self.stage == STAGES[0]:
            die()
        if self.stage == STAGES[1]:
            super()._write(pages[: len(pages) // 2])
            die()
        if self.stage == STAGES[2]:
            slot, first = pages[0]
            with (self.path / "pages.slab").open("r+b", buffering=0) as slab:
                slab.seek(4096 + slot * self.page_bytes)
                slab.write(first.data[: self.page_bytes // 2])
            die()
        written = super()._write(pages)
        if self.stage == STAGES[3]:
            die()
        return written

    def _record(self, stored: Sequence[tuple[int, Page]], evicted: Sequence[PageKey]) -> bool:
        recorded = super()._record(stored, evicted)
        if self.stage == STAGES[4]:
            die()
        return recorded


def main() -> None:
    """Write until the end."""
    folder, capacity_pages, stage, last = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    options = DiskOptions(sync_interval_s=3600.0)  # never: what survives does so without it
    tier = DyingTier(LAYOUT, folder, capacity_bytes=capacity_pages * LAYOUT.page_bytes, options=options)
    for number in range(last + 1):
        tier.stage = stage if number == last else ""
        assert all(tier.put(batch_pages(capacity_pages, number)))
        print(number, flush=True)


if __name__ == "__main__":
    main()
