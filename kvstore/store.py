"""The tiered store: what an engine asks for pages below its device tier.

``fetch`` fills device slots from the fastest tier that has each page, off the engine's thread and within a deadline;
``spill`` writes published device pages through to the tiers below, behind the engine's back. Neither ever blocks,
raises for a fault of a medium, or writes into a slot once its future is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from kvstore.memory import ByteRows, page_rows
from kvstore.page import PageKey, Tier
from kvstore.tiers.base import Found, OnChange, Page, PageTier, TierStats
from kvstore.tiers.device import DeviceTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Limits of one store."""

    fetch_deadline_s: float = 2.0
    fetch_threads: int = 2
    window_bytes: int = 8 << 20  # moved at once: the staging memory of each thread
    spill_queue_bytes: int = 256 << 20  # device pages pinned while they wait to be written through
    announce_pages: int = 100_000  # per tier


@dataclass(slots=True, eq=False)
class _Fetch:
    """One call of ``fetch``. ``lock`` is held while device slots are written and while the future is completed."""

    keys: Sequence[PageKey]
    slots: Sequence[int]
    deadline_s: float
    future: Future[list[Tier]] = field(default_factory=Future)
    filled: list[Tier] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: bool = False

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


class TieredStore:
    """One engine's device tier and the tiers below it, fastest first.

    ``on_change`` is told of the changes of every tier, in order for each tier, from any thread.
    """

    def __init__(
        self,
        device: DeviceTier,
        lower: Sequence[PageTier],
        *,
        options: StoreOptions | None = None,
        on_change: OnChange | None = None,
    ) -> None:
        options = options if options is not None else StoreOptions()
        tiers: list[PageTier] = [device, *lower]
        if [tier.tier for tier in tiers] != sorted({tier.tier for tier in tiers}):
            raise ValueError("tiers go from fast to slow, one of each")
        if {tier.page_bytes for tier in tiers} != {device.page_bytes}:
            raise ValueError("tiers of different page sizes")
        if on_change is not None:
            for tier in tiers:
                tier.on_change = on_change
        self.device = device
        self.lower = tuple(lower)
        self.options = options
        self._host = next((tier for tier in lower if tier.tier is Tier.HOST), None)
        self._window = max(1, options.window_bytes // device.page_bytes)
        self._staging: queue.SimpleQueue[ByteRows] = queue.SimpleQueue()
        for _ in range(options.fetch_threads + 1):
            self._staging.put(page_rows(self._window, device.page_bytes))
        self._fetchers = ThreadPoolExecutor(options.fetch_threads, thread_name_prefix="kvstore-fetch")
        self._spiller = ThreadPoolExecutor(1, thread_name_prefix="kvstore-spill")
        self._spill_limit = min(options.spill_queue_bytes // device.page_bytes, max(1, device.slots // 2))
        self._lock = threading.Condition()
        self._spilling = 0  # pages accepted and not yet copied out of the device
        self._spill_dropped = 0
        self._fetching: deque[_Fetch] = deque()  # in order of deadline: all have the same time allowed
        self._closed = False
        self._watchdog = threading.Thread(target=self._expire, name="kvstore-deadline", daemon=True)
        self._watchdog.start()

    def fetch(self, keys: Sequence[PageKey], slots: Sequence[int]) -> Future[list[Tier]]:
        """Fill ``slots[i]`` with the page of ``keys[i]`` for the longest leading run that the lower tiers hold.

        Returns at once. The result names the tier of each page filled, at most ``len(keys)``, and comes within the
        deadline. The slots must be private and stay pinned until the future is done; it can be cancelled only while
        it waits. Pages that came from disk or pool are promoted to host. Publishing is the caller's.
        """
        if len(keys) != len(slots):
            raise ValueError(f"{len(keys)} keys and {len(slots)} slots")
        job = _Fetch(keys, slots, time.monotonic() + self.options.fetch_deadline_s)
        with self._lock:
            if self._closed or not keys or not self.lower:
                job.future.set_result([])
                return job.future
            self._fetching.append(job)
            self._lock.notify_all()
            self._fetchers.submit(self._run_fetch, job).add_done_callback(_report)
        return job.future

    def spill(self, slots: Sequence[int]) -> None:
        """Write these published device pages through to the lower tiers, in the background.

        They are pinned until they are copied. What exceeds the queue is dropped, last pages first, and counted.
        """
        with self._lock:
            room = 0 if self._closed or not self.lower else max(0, self._spill_limit - self._spilling)
            accepted = list(slots[:room])
            self._spill_dropped += len(slots) - len(accepted) if self.lower else 0
            if not accepted:
                return
            self.device.retain(accepted)
            self._spilling += len(accepted)
            self._spiller.submit(self._run_spill, accepted).add_done_callback(_report)

    def announce(self) -> None:
        """Tell ``on_change`` of what the lower tiers hold already, as after a restart; bounded for each tier."""
        for tier in self.lower:
            tier.announce(self.options.announce_pages)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything accepted by ``spill`` so far is in the lower tiers; ``False`` if it takes longer."""
        with self._lock:
            if self._closed:
                return True
            marker = self._spiller.submit(lambda: None)
        try:
            marker.result(timeout_s)
        except FutureTimeoutError:
            return False
        return True

    def clear(self, *, storage: bool = False) -> None:
        """Forget every page on device and host; with ``storage`` also on disk and in the pool.

        Pages in use stay with their users, under no name.
        """
        for tier in (self.device, *self.lower):
            if storage or tier.tier <= Tier.HOST:
                tier.clear()

    def stats(self) -> dict[Tier, TierStats]:
        """Return each tier's counters; pages that ``spill`` dropped are the device's ``dropped``."""
        counters = {tier.tier: tier.stats() for tier in (self.device, *self.lower)}
        with self._lock:
            counters[Tier.DEVICE].dropped += self._spill_dropped
        return counters

    def check(self) -> None:
        """Verify every tier's invariants; raises ``AssertionError``."""
        for tier in (self.device, *self.lower):
            tier.check()

    def close(self) -> None:
        """Finish what was accepted, answer what waits with what it has, close every tier. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
        self._watchdog.join()
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        self._spiller.shutdown(wait=True)
        for tier in (*self.lower, self.device):
            tier.close()

    def _run_fetch(self, job: _Fetch) -> None:
        """A fetch thread's work: window after window until one is not filled whole."""
        if not job.start():
            return
        staging = self._staging.get()
        try:
            for start in range(0, len(job.keys), self._window):
                stop = min(start + self._window, len(job.keys))
                if self._fill_window(job, start, stop, staging) < stop - start:
                    break
        finally:
            self._staging.put(staging)
            job.finish()

    def _fill_window(self, job: _Fetch, start: int, stop: int, staging: ByteRows) -> int:
        """Fill the leading run of one window; return its length."""
        keys, slots = job.keys[start:stop], job.slots[start:stop]
        tiers: list[Tier | None] = [None] * len(keys)
        promoted: list[Page] = []
        rows = [memoryview(row) for row in staging[: len(keys)]]
        for tier in self.lower:
            missing = [place for place, found in enumerate(tiers) if found is None]
            if not missing:
                break
            wanted = [keys[place] for place in missing]
            direct = [self.device.view(slots[place]) for place in missing] if tier is self._host else []
            views = [view for view in direct if view is not None]
            answers: Sequence[Found | None]
            if len(views) == len(missing):
                with job.lock:  # memory to memory: short, and nothing may be written once the job is done
                    if job.future.done():
                        return 0
                    answers = tier.get(wanted, views)
            else:
                answers = tier.get(wanted, [rows[place] for place in missing])
                with job.lock:
                    if job.future.done():
                        return 0
                    for place, answer in zip(missing, answers, strict=True):
                        if answer is not None:
                            self.device.copy_in(slots[place], rows[place])
            for place, answer in zip(missing, answers, strict=True):
                if answer is not None:
                    tiers[place] = tier.tier
                    if tier.tier > Tier.HOST:
                        promoted.append(Page(keys[place], answer.meta, rows[place], answer.checksum))
        filled = _leading(tiers)
        with job.lock:
            if job.future.done():
                return 0
            job.filled += filled
        if self._host is not None and promoted:
            self._host.put(promoted)
        return len(filled)

    def _run_spill(self, slots: Sequence[int]) -> None:
        """The spill thread's work."""
        staging = self._staging.get()
        try:
            for start in range(0, len(slots), self._window):
                self._write_through(slots[start : start + self._window], staging)
        finally:
            self._staging.put(staging)

    def _write_through(self, slots: Sequence[int], staging: ByteRows) -> None:
        """Copy what some tier lacks out of the device, let the device go, then write it everywhere."""
        try:
            entries = [(slot, entry) for slot in slots if (entry := self.device.entry(slot)) is not None]
            held = [tier.exists([key for _, (key, _) in entries]) for tier in self.lower]
            lacking = [entry for entry, has in zip(entries, zip(*held, strict=True), strict=True) if not all(has)]
            pages = []
            for row, (slot, (key, meta)) in zip(staging, lacking, strict=False):
                data = memoryview(row)
                self.device.copy_out(slot, data)
                pages.append(Page(key, meta, data, self.device.checksum_of(slot, data)))
        finally:
            self.device.release(slots)
            with self._lock:
                self._spilling -= len(slots)
        for tier in self.lower:
            if pages:
                tier.put(pages)

    def _expire(self) -> None:
        """The deadline thread's work: complete fetches whose time is up, whatever holds their thread."""
        while True:
            with self._lock:
                while self._fetching and self._fetching[0].future.done():
                    self._fetching.popleft()
                if self._closed:
                    due = list(self._fetching)
                elif not self._fetching:
                    self._lock.wait()
                    continue
                else:
                    left_s = self._fetching[0].deadline_s - time.monotonic()
                    if left_s > 0:
                        self._lock.wait(left_s)
                        continue
                    due = [self._fetching.popleft()]
            for job in due:
                job.finish()
            if self._closed:
                return


def _report(task: Future[None]) -> None:
    """Say so when a background task ended by a bug; faults of a medium never get here."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the store failed", exc_info=error)


def _leading(tiers: Sequence[Tier | None]) -> list[Tier]:
    run: list[Tier] = []
    for tier in tiers:
        if tier is None:
            break
        run.append(tier)
    return run
