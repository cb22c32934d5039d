"""The disk tier: page bytes in a slab, where they are in an index, and both still good after any crash.

The order of a write is: bytes, then index record, then findable. A crash between any two leaves either nothing or a
page that verifies; a slot that was reused under an old record, a torn write or a flipped bit fails the page's checksum
and is a miss. Pages outlive the process; what power loss can take are the writes of the last ``sync_interval_s``.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from kvstore.breaker import Breaker, BreakerOptions
from kvstore.codec import IndexRecord, PageHeader, checksum
from kvstore.errors import MediumError, MediumInUse
from kvstore.page import PageKey, PageLayout, Tier
from kvstore.policy import EvictionPolicy
from kvstore.tiers.base import OnChange, Page
from kvstore.tiers.slab import Slab, neighbours
from kvstore.tiers.slab_index import SlabIndex
from kvstore.tiers.slotted import Fault, SlottedTier


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Limits of one disk tier."""

    readers: int = 4  # a single reader leaves half of the disk's bandwidth
    read_run_bytes: int = 2 << 20  # of one call: hashed while still in cache
    write_run_bytes: int = 8 << 20
    sync_interval_s: float = 1.0
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class DiskTier(SlottedTier):
    """Pages in one folder, which one process at a time has open. Satisfies ``PageTier``."""

    tier = Tier.DISK

    def __init__(
        self,
        layout: PageLayout,
        path: Path,
        *,
        capacity_bytes: int,
        on_change: OnChange | None = None,
        policy: EvictionPolicy[PageKey] | None = None,
        options: DiskOptions | None = None,
    ) -> None:
        """Open or create the tier, with as many whole pages as ``capacity_bytes`` holds, and find what is there.

        Content of another layout or format is given up and counted as an alarm. Raises ``MediumError``.
        """
        super().__init__(layout, slots=capacity_bytes // layout.page_bytes, on_change=on_change, policy=policy)
        self.options = options if options is not None else DiskOptions()
        self.path = path
        self._lock_fd = _lock_folder(path)
        try:
            self._slab = Slab(path / "pages.slab", self._fingerprint, page_bytes=self.page_bytes, slots=self.slots)
            self._index = SlabIndex(path / "index", slots=self.slots)
        except MediumError:
            os.close(self._lock_fd)
            raise
        self._sums = [0] * self.slots
        self._sequence = 0
        self._reopen()
        self._readers = ThreadPoolExecutor(self.options.readers, thread_name_prefix="kvstore-disk")
        self.breaker = Breaker(f"disk tier {path}", self._probe, self.options.breaker)
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_groups, name="kvstore-sync", daemon=True)
        self._syncer.start()

    @property
    def direct(self) -> bool:
        """Whether pages bypass the operating system's page cache."""
        return self._slab.direct

    def sync(self) -> bool:
        """Return once everything stored so far survives power loss; ``False`` if the medium failed."""
        self._dirty.clear()
        try:
            self._slab.sync()
            self._index.sync()
        except (OSError, lmdb.Error) as error:
            self.breaker.trip(f"sync failed: {error}")
            return False
        return True

    def close(self) -> None:
        """See ``PageTier``."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._dirty.set()
        self._syncer.join()
        self._readers.shutdown()
        with self._writing:
            self.sync()
            self.breaker.stop()
            self._index.close()
            self._slab.close()
            os.close(self._lock_fd)

    def _available(self) -> bool:
        return self.breaker.closed and not self._closing.is_set()

    def _reopen(self) -> None:
        """Make findable what the index and the slab agree on; forget the rest, counted."""
        for problem in (self._slab.problem, self._index.problem):
            if problem:
                self._stats.alarm(problem)
        records, refused = self._index.load()
        good = []
        for record in records:
            if record.generation != self._slab.header.generation:
                refused[record.header.key] = "generation"
            elif record.header.length != self.page_bytes or self._slab.whole_slots <= record.slot < self.slots:
                refused[record.header.key] = "length"
            else:
                good.append(record)
        outside = [record.header.key for record in good if record.slot >= self.slots]  # the tier was made smaller
        good = [record for record in good if record.slot < self.slots]
        twice = self._table.restore((record.slot, record.header.key, record.header.meta) for record in good)
        refused |= dict.fromkeys(twice, "slot")
        for record in good:
            if self._table.find(record.header.key) == record.slot:
                self._sums[record.slot] = record.header.checksum
        for reason in refused.values():
            self._stats.alarm(reason)
        self._sequence = max((record.sequence for record in records), default=0)
        self._index.update([], [*refused, *outside])

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        answers: list[int | Fault] = [Fault.UNAVAILABLE] * len(wanted)
        slots = [slot for slot, _ in wanted]

        def read_run(run: list[int]) -> None:
            try:
                got = self._slab.read(slots[run[0]], [wanted[place][1] for place in run])
            except OSError as error:
                self.breaker.trip(f"read failed: {error}")
                return
            for position, place in enumerate(run):
                slot, out = wanted[place]
                if got < (position + 1) * self.page_bytes:
                    answers[place] = Fault.LENGTH
                else:
                    found = checksum(out)
                    answers[place] = found if found == self._sums[slot] else Fault.CHECKSUM

        runs = list(neighbours(slots, page_bytes=self.page_bytes, run_bytes=self.options.read_run_bytes))
        if len(runs) <= 1:
            for run in runs:
                read_run(run)
        else:
            list(self._readers.map(read_run, runs))
        return answers

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        written = [False] * len(pages)
        slots = [slot for slot, _ in pages]
        for run in neighbours(slots, page_bytes=self.page_bytes, run_bytes=self.options.write_run_bytes):
            try:
                done = self._slab.write(slots[run[0]], [pages[place][1].data for place in run])
            except OSError as error:
                self.breaker.trip(f"write failed: {error}")
                break
            if done < len(run) * self.page_bytes:
                self.breaker.trip("write failed: no space left")
                break
            for place in run:
                written[place] = True
        return written

    def _record(self, stored: Sequence[tuple[int, Page]], evicted: Sequence[PageKey]) -> bool:
        records = []
        for slot, page in stored:
            self._sequence += 1
            self._sums[slot] = page.checksum
            header = PageHeader(page.key, self.page_bytes, page.checksum, page.meta)
            records.append(IndexRecord(header, slot, self._slab.header.generation, self._sequence))
        try:
            self._index.update(records, evicted)
        except lmdb.Error as error:
            self.breaker.trip(f"index not written: {error}")
            return False
        self._dirty.set()
        return True

    def _probe(self) -> bool:
        try:
            self._slab.probe()
        except OSError:
            return False
        return True

    def _sync_groups(self) -> None:
        """The sync thread's work: one sync for all that was stored in an interval."""
        while not self._closing.is_set():
            self._dirty.wait()
            self._closing.wait(self.options.sync_interval_s)
            if self.breaker.closed and not self._closing.is_set():
                self.sync()


def _lock_folder(path: Path) -> int:
    """Create the folder if need be and keep every other process out of it. Raises ``MediumError``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MediumError(f"cannot use {path} as a disk tier: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise MediumInUse(f"another process has the disk tier {path} open") from error
    return fd
