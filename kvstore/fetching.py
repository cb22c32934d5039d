"""Bringing pages up, off the caller's thread and within a deadline that holds whatever a medium does.

Pages from disk and pool are read into memory of our own and copied to where they are wanted under the job's lock; so a
read that hangs in the kernel, or comes late, or was cancelled, never writes into memory that its caller has back.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from kvstore.in_flight import InFlight
from kvstore.memory import ByteRows, copy_bytes, page_rows
from kvstore.page import PageKey, Tier
from kvstore.tiers.base import Found, Page, PageTier
from kvstore.tiers.host import InPlaceTier

log = logging.getLogger(__name__)

OnRead = Callable[[Tier, int, float], None]
"""Told of each read below the host: the tier, the bytes that it brought, the seconds that it took. One whose caller's
time was up is told of twice: at once, as having taken for ever, and when it has come to an end."""


class Target(Protocol):
    """Where the pages of one read are wanted, by their places among its keys."""

    def view(self, place: int) -> memoryview | None:
        """Return a page's memory where the processor reaches it in one piece, else ``None``."""

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        """Copy pages there; ``False`` if they cannot be: the read is then over, and these were not filled.

        Nobody writes to the memory, or reads ``data``, after the call.
        """


@dataclass(frozen=True, slots=True)
class BufferTarget:
    """A caller's buffers."""

    buffers: Sequence[memoryview]

    def view(self, place: int) -> memoryview | None:
        """See ``Target``."""
        return self.buffers[place]

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        """See ``Target``."""
        for place, one in zip(places, data, strict=True):
            copy_bytes(self.buffers[place], one)
        return True


class Nowhere:
    """Where pages are wanted that are only to be promoted."""

    def view(self, place: int) -> memoryview | None:
        """See ``Target``."""
        return None

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        """See ``Target``."""
        return True


@dataclass(slots=True, eq=False)
class _Job:
    """One call. ``lock`` is held while its target is written and while the future is completed."""

    keys: Sequence[PageKey]
    target: Target
    deadline_s: float
    to_first_gap: bool
    filled: list[Tier | None]
    future: Future[list[Tier | None]] = field(default_factory=Future)
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: bool = False
    reading: Tier | None = None  # below the host, at this moment
    is_refused: bool = False  # by the target

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be, or can be, filled."""
        return self.is_refused or self.future.done()

    def fill(self, tier: Tier, places: Sequence[int], data: Sequence[memoryview]) -> None:
        """Give the target pages that came from a tier, unless it is over; ``lock`` is held."""
        if self.is_over or not places:
            return
        if not self.target.fill(places, data):
            self.is_refused = True
            return
        for place in places:
            self.filled[place] = tier

    def start(self) -> bool:
        """From here on the future cannot be cancelled; ``False`` if it is cancelled or complete already."""
        with self.lock:
            return self._start()

    def finish(self) -> None:
        """Complete the future with what is filled by now; the first to come does it."""
        with self.lock:
            if (self.started or self._start()) and not self.future.done():
                self.future.set_result(list(self.filled))

    def _start(self) -> bool:
        if self.started or not self.future.set_running_or_notify_cancel():
            return False
        self.started = True
        return True


class Fetcher:
    """Reads from tiers, fastest first, in a few threads; promotes to the host tier what came from below it, if told."""

    def __init__(
        self,
        tiers: Sequence[PageTier],
        in_flight: InFlight,
        *,
        threads: int,
        window_bytes: int,
        promotes: bool = True,
        on_read: OnRead | None = None,
    ) -> None:
        self._tiers = tuple(tiers)
        self._promotes = promotes
        self._on_read = on_read
        self._host = next((tier for tier in tiers if tier.tier is Tier.HOST), None)
        self._in_place = self._host if isinstance(self._host, InPlaceTier) else None
        self._below = tuple(tier for tier in tiers if tier is not self._host)
        self._in_flight = in_flight
        page_bytes = tiers[0].page_bytes if tiers else 1
        self._window = max(1, window_bytes // page_bytes)
        self.memory = [page_rows(self._window, page_bytes) for _ in range(threads if tiers else 0)]
        self._staging: queue.SimpleQueue[ByteRows] = queue.SimpleQueue()
        for rows in self.memory:
            self._staging.put(rows)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-fetch")
        self._lock = threading.Condition()
        self._due: list[tuple[float, int, _Job]] = []  # a heap by deadline
        self._numbers = count()
        self._closed = False
        self._forgotten = 0  # how often pages were removed or forgotten below
        self._watchdog = threading.Thread(target=self._expire, name="kvstore-deadline", daemon=True)
        self._watchdog.start()

    def start(
        self, keys: Sequence[PageKey], target: Target, *, deadline_s: float, to_first_gap: bool
    ) -> Future[list[Tier | None]]:
        """Fill the target with the pages of the keys; the result names the tier that each came from.

        Returns at once; the result comes within the deadline (of ``time.monotonic``), and the target is not written
        after it. The future can be cancelled only while it waits. With ``to_first_gap`` nothing is asked for beyond the
        first window that has a miss in it.
        """
        job = _Job(keys, target, deadline_s, to_first_gap, [None] * len(keys))
        with self._lock:
            if self._closed or not keys or not self._tiers:
                job.future.set_result(list(job.filled))
                return job.future
            heappush(self._due, (deadline_s, next(self._numbers), job))
            self._lock.notify_all()
            self._threads.submit(self._run, job).add_done_callback(report)
        return job.future

    def forget_promotions(self) -> None:
        """Pages were removed or forgotten below: what was read before that is not promoted any more."""
        with self._lock:
            self._forgotten += 1

    def close(self) -> None:
        """Answer what waits with what it has; wait for what runs."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._watchdog.join()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: _Job) -> None:
        if not job.start():
            return
        staging = self._staging.get()
        try:
            for start in range(0, len(job.keys), self._window):
                places = range(start, min(start + self._window, len(job.keys)))
                self._fill(job, list(places), staging)
                if job.is_over or (job.to_first_gap and any(job.filled[place] is None for place in places)):
                    break
        finally:
            self._staging.put(staging)
            job.finish()

    def _fill(self, job: _Job, places: Sequence[int], staging: ByteRows) -> None:
        """Fill one window: from host, then what nobody else is moving, then what somebody was."""
        releases = self._in_flight.releases
        missing = self._from_host(job, places)
        if not missing or job.is_over:
            return
        if self._host is None:
            self._in_flight.wait([job.keys[place] for place in missing], job.deadline_s)
            self._from_below(job, missing, staging)
            return
        mine, _ = self._in_flight.claim([job.keys[place] for place in missing])
        own = set(mine)
        wanted = [place for place in missing if job.keys[place] in own]
        try:
            if self._in_flight.releases != releases:  # what was missing may have come up before it was claimed
                wanted = self._from_host(job, wanted)
            self._from_below(job, wanted, staging)
        finally:
            self._in_flight.release(mine)
        others = [place for place in missing if job.keys[place] not in own]
        if others and not job.is_over:
            self._in_flight.wait([job.keys[place] for place in others], job.deadline_s)
            self._from_below(job, self._from_host(job, others), staging)

    def _from_host(self, job: _Job, places: Sequence[int]) -> list[int]:
        """Copy what the host tier has straight to where it is wanted; return the places of the rest."""
        host, in_place = self._host, self._in_place
        if host is None:
            return list(places)
        keys, views = [job.keys[place] for place in places], [job.target.view(place) for place in places]
        buffers = [view for view in views if view is not None]
        with job.lock:  # memory to memory: short, and nothing may be written once the job is done
            if job.is_over:
                return []
            if len(buffers) == len(places):
                answers = host.get(keys, buffers)
                for place, answer in zip(places, answers, strict=True):
                    if answer is not None:
                        job.filled[place] = host.tier
            elif in_place is not None:
                answers = in_place.get_in_place(
                    keys, lambda found, rows: job.fill(host.tier, [places[i] for i in found], rows)
                )
            else:
                return list(places)  # it goes through staging, with what comes from below
        return [place for place, answer in zip(places, answers, strict=True) if answer is None]

    def _from_below(self, job: _Job, places: Sequence[int], staging: ByteRows) -> None:
        """Read through staging, tier after tier, and promote what came from below the host."""
        rows = {place: memoryview(row) for place, row in zip(places, staging, strict=False)}
        promoted: list[Page] = []
        forgotten = self._forgotten
        through_staging = self._below
        if self._in_place is None and places and job.target.view(places[0]) is None:
            through_staging = self._tiers
        for tier in through_staging:
            places = [place for place in places if job.filled[place] is None]
            if not places or job.is_over:
                break
            job.reading = tier.tier if tier.tier > Tier.HOST else None
            answers = self._read(tier, [job.keys[place] for place in places], [rows[place] for place in places])
            job.reading = None
            found = [place for place, answer in zip(places, answers, strict=True) if answer is not None]
            with job.lock:
                job.fill(tier.tier, found, [rows[place] for place in found])
            if tier.tier > Tier.HOST:  # also for a caller that is gone: the next one has it sooner
                promoted += [
                    Page(job.keys[place], answer.meta, rows[place], answer.checksum, answer.expires_at_s)
                    for place, answer in zip(places, answers, strict=True)
                    if answer is not None
                ]
        if self._host is not None and self._promotes and promoted:
            self._host.put(promoted)
            if self._forgotten != forgotten:
                self._host.remove([page.key for page in promoted])

    def _read(self, tier: PageTier, keys: Sequence[PageKey], rows: Sequence[memoryview]) -> Sequence[Found | None]:
        began_s = time.monotonic()
        answers = tier.get(keys, rows)
        if self._on_read is not None and tier.tier > Tier.HOST:
            found = sum(answer is not None for answer in answers)
            self._on_read(tier.tier, found * tier.page_bytes, time.monotonic() - began_s)
        return answers

    def _expire(self) -> None:
        """The deadline thread's work: complete jobs whose time is up, whatever holds their thread."""
        while True:
            with self._lock:
                while self._due and self._due[0][2].future.done():
                    heappop(self._due)
                if self._closed:
                    due = [job for _, _, job in self._due]
                elif not self._due:
                    self._lock.wait()
                    continue
                else:
                    left_s = self._due[0][0] - time.monotonic()
                    if left_s > 0:
                        self._lock.wait(left_s)
                        continue
                    due = [heappop(self._due)[2]]
            for job in due:
                job.finish()
                if (tier := job.reading) is not None and self._on_read is not None and not self._closed:
                    self._on_read(tier, 0, math.inf)
            if self._closed:
                return


def report(task: Future[None]) -> None:
    """Say so when a background task ended by a bug; faults of a medium never get here."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the store failed", exc_info=error)
