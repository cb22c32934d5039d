"""A tier that answers when it is let, in place of a disk that is slow or hangs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.page import Tier
from kvstore.tiers.base import Page
from kvstore.tiers.host import HostTier
from kvstore.tiers.slotted import Fault
from tests.samples.pages import LAYOUT

PAGE = LAYOUT.page_bytes


class GatedTier(HostTier):
    """Stands for a disk; it answers when its gate is open."""

    tier = Tier.DISK
    gate: threading.Event
    reading: threading.Semaphore

    def __init__(self) -> None:
        super().__init__(LAYOUT, capacity_bytes=64 * PAGE)
        self.gate, self.reading = threading.Event(), threading.Semaphore(0)

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        self.reading.release()
        self.gate.wait()
        return super()._read(wanted)

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        self.gate.wait()
        return super()._write(pages)
