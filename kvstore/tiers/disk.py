"""The disk tier: page bytes in a slab, where they are in an index, and both still good after any crash.

The order of a write is: bytes, then index record, then findable. A crash between any two leaves either nothing or a
page that verifies; a slot that was reused under an old record, a torn write or a flipped bit fails the page's checksum
and is a miss. Pages outlive the process; what power loss can take are the writes of the last ``sync_interval_s``.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import msgspec

from kvstore.at_rest import AtRest, at_rest_from_environment
from kvstore.breaker import Breaker, BreakerOptions
from kvstore.codec import IndexRecord, PageHeader
from kvstore.deadline import Allowance
from kvstore.errors import MediumError, MediumInUse, RecordError
from kvstore.page import PageKey, PageLayout, Tier
from kvstore.page_forms import PageForms, forms_of
from kvstore.policy import EvictionPolicy
from kvstore.retention import RetentionRules
from kvstore.tiers.base import OnChange, Page
from kvstore.tiers.disk_status import DiskStatus, namespace_counts, write_status
from kvstore.tiers.page_io import LATE, Moved, Run, neighbours, page_io
from kvstore.tiers.slab import SLAB_NAME, Slab
from kvstore.tiers.slab_index import INDEX_NAME, SlabIndex
from kvstore.tiers.slotted import Fault, SlottedTier


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Limits of one disk tier."""

    read_s: Allowance = field(default_factory=Allowance)
    write_s: Allowance = field(default_factory=lambda: Allowance(fixed_s=2.0))  # behind the engine's back
    queue_depth: int = 32  # runs on their way at once
    run_bytes: int = 512 << 10  # of one request: hashed while still in cache
    sync_interval_s: float = 1.0
    at_rest: AtRest = field(default_factory=at_rest_from_environment)
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that is not believed."""

    key: PageKey
    reason: str


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
        retention: RetentionRules | None = None,
        clock: Callable[[], float] = time.time,
        options: DiskOptions | None = None,
    ) -> None:
        """Open or create the tier, with as many whole pages as ``capacity_bytes`` holds, and find what is there.

        Content of another layout or format is given up and counted as an alarm. Raises ``MediumError``.
        """
        self.options = options if options is not None else DiskOptions()
        self._forms = forms_of(layout, self.options.at_rest)
        self._slot_bytes = layout.page_bytes if self._forms is None else self._forms.slot_bytes
        super().__init__(
            layout,
            slots=capacity_bytes // self._slot_bytes,
            on_change=on_change,
            policy=policy,
            retention=retention,
            clock=clock,
        )
        self.path = path
        self._lock_fd = lock_folder(path)
        try:
            self._slab = Slab(path / SLAB_NAME, self._fingerprint, page_bytes=self._slot_bytes, slots=self.slots)
            self._index = SlabIndex(path / INDEX_NAME, slots=self.slots)
        except MediumError:
            os.close(self._lock_fd)
            raise
        self._sums = [0] * self.slots
        self._formed: dict[int, PageHeader] = {}  # by slot, where pages lie in forms of their own
        self._told: dict[int, PageHeader] = {}  # by slot, what the index is to say of those that are being written
        self._sequence = 0
        self._owed: dict[PageKey, None] = {}  # gone, and the index does not know it yet
        try:
            self._reopen()
        except (MediumError, lmdb.Error) as error:
            self._index.close()
            self._slab.close()
            os.close(self._lock_fd)
            raise MediumError(f"cannot use {path} as a disk tier: {error}") from error
        self._io = page_io(self._slot_bytes, self.options.queue_depth)
        self.breaker = Breaker(f"disk tier {path}", self._probe, self.options.breaker)
        self._tell_status()
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
        self._io.close()
        with self._writing:
            if self._owed:
                self._record([], ())
            self.sync()
            self.breaker.stop()
            self._index.close()
            self._slab.close()
            os.close(self._lock_fd)

    def _available(self) -> bool:
        return self.breaker.closed and not self._closing.is_set()

    def _reopen(self) -> None:
        """Make findable what the index and the slab agree on; forget the rest, counted."""
        records, refused = self._index.load()
        is_lost = self._index.is_new and not (self._slab.is_new or self._slab.problem)
        for problem in (self._slab.problem, self._index.problem or ("index" if is_lost else "")):
            if problem:
                self._stats.alarm(problem)
        good = []
        for record in map(self._opened, records):
            if isinstance(record, Refused):
                refused[record.key] = record.reason
            elif record.generation != self._slab.header.generation:
                refused[record.header.key] = "generation"
            elif record.header.length != self.page_bytes or self._slab.whole_slots <= record.slot < self.slots:
                refused[record.header.key] = "length"
            else:
                good.append(record)
        outside = [record.header.key for record in good if record.slot >= self.slots]  # the tier was made smaller
        good = [record for record in good if record.slot < self.slots]
        now_s = self._clock()
        outside += [record.header.key for record in good if 0 < record.header.expires_at_s <= now_s]
        good = [record for record in good if not 0 < record.header.expires_at_s <= now_s]
        twice = self._table.restore(
            (record.slot, record.header.key, record.header.meta, record.header.expires_at_s) for record in good
        )
        refused |= dict.fromkeys(twice, "slot")
        for record in good:
            if self._table.find(record.header.key) == record.slot:
                self._sums[record.slot] = record.header.checksum
                if self._forms is not None:
                    self._formed[record.slot] = record.header
        for reason in refused.values():
            self._stats.alarm(reason)
        self._sequence = max((record.sequence for record in records), default=0)
        self._index.update([], [*refused, *outside])

    def _opened(self, record: IndexRecord) -> IndexRecord | Refused:
        """Return a record with all that its header tells those who may read it, or why it is refused."""
        try:
            if self._forms is not None:
                return msgspec.structs.replace(record, header=self._forms.open_header(record.header))
            if (form := record.header.form) is not None:
                raise RecordError("unknown_key" if form.envelope is not None else "form")
        except RecordError as error:
            return Refused(record.header.key, error.reason)
        return record

    def _read_formed(self, wanted: Sequence[tuple[int, memoryview]], forms: PageForms) -> list[int | Fault]:
        """Do what ``_read`` does where pages lie in forms of their own: through memory of ours."""
        answers: list[int | Fault] = [Fault.UNAVAILABLE] * len(wanted)
        with forms.reader() as workshop:
            for start in range(0, len(wanted), len(workshop.rows)):
                part = wanted[start : start + len(workshop.rows)]
                rows = [row[: self._slot_bytes] for row in workshop.rows[: len(part)]]
                for places, moved in self._move([slot for slot, _ in part], rows, write=False):
                    if not self._has_arrived(moved):
                        continue
                    for position, place in enumerate(places):
                        slot, out = part[place]
                        header = self._formed[slot]
                        stored = rows[place][: header.length if header.form is None else header.form.length]
                        try:
                            if moved.result < (position + 1) * self._slot_bytes:
                                raise RecordError("length")
                            answers[start + place] = forms.restore(header, stored, out, workshop)
                        except RecordError as error:
                            answers[start + place] = Fault(error.reason)
        return answers

    def _write_formed(self, pages: Sequence[tuple[int, Page]], forms: PageForms) -> list[bool]:
        """Do what ``_write`` does where pages are stored in forms of their own."""
        written = [False] * len(pages)
        workshop = forms.writer
        for start in range(0, len(pages), len(workshop.rows)):
            slots, rows, of = [], [], []
            for row, place in zip(workshop.rows, range(start, len(pages)), strict=False):
                slot, page = pages[place]
                stored = forms.store(page, row, workshop, self._expiry(page))
                if stored is not None:
                    self._formed[slot], self._told[slot] = stored.known, stored.told
                    slots.append(slot)
                    rows.append(row[: self._slot_bytes])
                    of.append(place)
            for places, moved in self._move(slots, rows, write=True):
                if self._has_left(moved, len(places)):
                    for place in places:
                        written[of[place]] = True
        return written

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        if self._forms is not None:
            return self._read_formed(wanted, self._forms)
        answers: list[int | Fault] = [Fault.UNAVAILABLE] * len(wanted)
        for places, moved in self._move([slot for slot, _ in wanted], [out for _, out in wanted], write=False):
            if self._has_arrived(moved):
                for position, place in enumerate(places):
                    whole = moved.result >= (position + 1) * self.page_bytes
                    good = whole and moved.sums[position] == self._sums[wanted[place][0]]
                    answers[place] = moved.sums[position] if good else Fault.CHECKSUM if whole else Fault.LENGTH
        return answers

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        if self._forms is not None:
            return self._write_formed(pages, self._forms)
        written = [False] * len(pages)
        for places, moved in self._move([slot for slot, _ in pages], [page.data for _, page in pages], write=True):
            if self._has_left(moved, len(places)):
                for place in places:
                    written[place] = True
        return written

    def _has_arrived(self, moved: Moved) -> bool:
        """Tell whether a run was read, in whole or in part; a medium that failed is out of use from here on."""
        if moved.result == LATE:
            self.breaker.trip("reads take longer than they may")
        elif moved.result < 0:
            self.breaker.trip(f"read failed: {os.strerror(-moved.result)}")
        return moved.result >= 0

    def _has_left(self, moved: Moved, pages: int) -> bool:
        """Tell whether a run was written to its end; a medium that failed is out of use from here on."""
        if moved.result == pages * self._slot_bytes:
            return True
        if moved.result == LATE:
            self.breaker.trip("writes take longer than they may")
        else:
            reason = os.strerror(-moved.result) if moved.result < 0 else "no space left"
            self.breaker.trip(f"write failed: {reason}")
        return False

    def _move(
        self, slots: Sequence[int], buffers: Sequence[memoryview], *, write: bool
    ) -> Iterator[tuple[list[int], Moved]]:
        """Move pages in runs of neighbours; yield for each run the places of its pages and what became of it."""
        allowance = self.options.write_s if write else self.options.read_s
        runs = list(neighbours(slots, page_bytes=self._slot_bytes, run_bytes=self.options.run_bytes))
        moved = self._io.move(
            [Run(self._slab.offset(slots[run[0]]), [buffers[place] for place in run]) for run in runs],
            fd=self._slab.fd,
            direct_fd=self._slab.direct_fd,
            write=write,
            deadline_s=allowance.deadline_s(len(slots) * self._slot_bytes),
        )
        return zip(runs, moved, strict=True)

    def _record(self, stored: Sequence[tuple[int, Page]], evicted: Sequence[PageKey]) -> bool:
        records = []
        for slot, page in stored:
            self._sequence += 1
            self._sums[slot] = page.checksum
            if self._forms is not None:
                header = self._told.pop(slot)
            else:
                header = PageHeader(page.key, self.page_bytes, page.checksum, page.meta, self._expiry(page))
            records.append(IndexRecord(header, slot, self._slab.header.generation, self._sequence))
        gone = dict.fromkeys(evicted) | self._owed
        try:
            self._index.update(records, gone)
        except lmdb.Error as error:
            self._owed = gone  # what was removed or forgotten must not come back with the next process
            self.breaker.trip(f"index not written: {error}")
            return False
        self._owed = {}
        self._dirty.set()
        return True

    def _probe(self) -> bool:
        try:
            self._slab.probe()
            self._index.keep_room()
        except (OSError, lmdb.Error):
            return False
        if self._owed and self._writing.acquire(blocking=False):  # a writer, or who closes the tier, does it else
            try:
                return self._record([], ())
            finally:
                self._writing.release()
        return True

    def _sync_groups(self) -> None:
        """The sync thread's work: one sync for all that was stored in an interval."""
        while not self._closing.is_set():
            self._dirty.wait()
            self._closing.wait(self.options.sync_interval_s)
            if self.breaker.closed and not self._closing.is_set():
                self.sync()
                self._tell_status()

    def _tell_status(self) -> None:
        """Tell other processes how full the tier is."""
        with self._lock:
            pages, counts = self._table.published, self._table.counts()
        hides_names = self._forms is not None and self._forms.encrypts
        names = None if hides_names else namespace_counts(counts)
        layout = self._fingerprint.hex()
        status = DiskStatus(os.getpid(), time.time(), layout, pages, self._slot_bytes, self.slots, names)
        write_status(self.path, status)


def lock_folder(path: Path) -> int:
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
