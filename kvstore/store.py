"""The tiered store of the embedded engine: its device tier, and the tiers below it.

``fetch`` fills device slots from the fastest tier that has each page, off the engine's thread and within a deadline;
``spill`` writes published device pages through to the tiers below, behind the engine's back. Neither ever blocks,
raises for a fault of a medium, or writes into a slot once its future is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from kvstore.deadline import Allowance
from kvstore.fetching import report
from kvstore.memory import ByteRows, page_rows
from kvstore.page import Namespace, PageKey, Tier
from kvstore.page_store import PageStore, PageStoreOptions, WritePolicy
from kvstore.tiers.base import NewPage, OnChange, Page, PageTier, TierStats
from kvstore.tiers.device import DeviceTier


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Limits of one store."""

    fetch_s: Allowance = field(default_factory=Allowance)
    fetch_threads: int = 2
    window_bytes: int = 8 << 20  # moved at once: the staging memory of each thread
    spill_queue_bytes: int = 256 << 20  # device pages pinned while they wait to be copied; as much waits for the disk
    announce_pages: int = 100_000  # per tier
    write_policy: WritePolicy = WritePolicy.THROUGH
    back_bytes: int = 256 << 20  # see ``PageStoreOptions``


@dataclass(frozen=True, slots=True)
class _SlotTarget:
    """Private device slots."""

    device: DeviceTier
    slots: Sequence[int]

    def view(self, place: int) -> memoryview | None:
        return self.device.view(self.slots[place])

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        return self.device.copy_in([self.slots[place] for place in places], data)


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
        self.below = PageStore(
            lower,
            PageStoreOptions(
                get_s=options.fetch_s,
                fetch_threads=options.fetch_threads,
                window_bytes=options.window_bytes,
                behind_bytes=options.spill_queue_bytes,
                write_policy=options.write_policy,
                back_bytes=options.back_bytes,
            ),
        )
        self._window = max(1, options.window_bytes // device.page_bytes)
        self._staging: ByteRows = page_rows(self._window if lower else 0, device.page_bytes)
        for rows in (self._staging, *self.below.memory):
            device.lock(rows)
        self._spiller = ThreadPoolExecutor(1, thread_name_prefix="kvstore-spill")
        self._spill_limit = min(options.spill_queue_bytes // device.page_bytes, max(1, device.slots // 2))
        self._lock = threading.Lock()
        self._spilling = 0  # pages accepted and not yet copied out of the device
        self._spill_dropped = 0
        self._forgotten = 0  # how often pages were forgotten
        self._closed = False

    def fetch(self, keys: Sequence[PageKey], slots: Sequence[int]) -> Future[list[Tier]]:
        """Fill ``slots[i]`` with the page of ``keys[i]`` for the longest leading run that the lower tiers hold.

        Returns at once. The result names the tier of each page filled, at most ``len(keys)``, and comes within the
        deadline. The slots must be private and stay pinned until the future is done; it can be cancelled only while
        it waits. Pages that came from disk or pool are promoted to host. Publishing is the caller's. On a GPU what the
        caller's current stream has been given comes before what is written into the slots.
        """
        if len(keys) != len(slots):
            raise ValueError(f"{len(keys)} keys and {len(slots)} slots")
        self.device.hand_over()
        target = _SlotTarget(self.device, list(slots))
        timeout_s = self.options.fetch_s.seconds(len(keys) * self.device.page_bytes)
        return _LeadingRun(self.below.start_get(keys, target, timeout_s=timeout_s, to_first_gap=True))

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
            for start in range(0, len(accepted), self._window):  # each lets its own pages go, whatever comes of others
                window = accepted[start : start + self._window]
                self._spiller.submit(self._write_through, window).add_done_callback(report)

    def announce(self) -> None:
        """Tell ``on_change`` of what the lower tiers hold already, as after a restart; bounded for each tier."""
        for tier in self.lower:
            tier.announce(self.options.announce_pages)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything accepted by ``spill`` so far is in the lower tiers; ``False`` if it takes longer."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            if self._closed:
                return True
            marker = self._spiller.submit(lambda: None)
        try:
            marker.result(timeout_s)
        except FutureTimeoutError:
            return False
        return self.below.flush(max(0.0, until_s - time.monotonic()))

    def clear(self, *, storage: bool = False) -> None:
        """Forget every page on device and host; with ``storage`` also on disk and in the pool.

        What is on its way down just then is forgotten everywhere. Pages in use stay with their users, under no name.
        """
        self.device.clear()
        self._forget_spilled()
        self.below.clear(storage=storage)

    def forget(self, namespace: Namespace) -> int:
        """Forget a namespace in every tier; return how many pages of all tiers that were."""
        forgotten = self.device.forget(namespace)
        self._forget_spilled()
        return forgotten + self.below.forget(namespace)

    def retire(self, keys: Sequence[PageKey]) -> None:
        """The run that these pages belong to has ended: in every tier they go before all others.

        In the background, behind what is being spilled, which holds pages until it is copied.
        """
        with self._lock:
            if not self._closed:
                self._spiller.submit(self._retire, list(keys))

    def stats(self) -> dict[Tier, TierStats]:
        """Return each tier's counters; pages that ``spill`` dropped are the device's ``dropped``."""
        counters = {Tier.DEVICE: self.device.stats()} | self.below.stats()
        with self._lock:
            counters[Tier.DEVICE].dropped += self._spill_dropped
        return counters

    def check(self) -> None:
        """Verify every tier's invariants; raises ``AssertionError``."""
        self.device.check()
        self.below.check()

    def close(self) -> None:
        """Finish what was accepted, answer what waits with what it has, close every tier. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.below.stop_fetching()
        self._spiller.shutdown(wait=True)
        self.below.close()
        self.device.close()

    def _forget_spilled(self) -> None:
        """What is being spilled may have been copied by now; it goes again if it lands too late to be found."""
        with self._lock:
            self._forgotten += 1

    def _write_through(self, slots: Sequence[int]) -> None:
        """The spill thread's work: copy what some tier lacks out of the device, let the device go, then give it to the
        tiers below."""
        forgotten = self._forgotten
        mine: list[PageKey] = []
        try:
            try:
                new = self._lacking(slots)
                mine, _ = self.below.in_flight.claim([page.key for _, page in new])
                pages = self._stage(self._put_in_host(new))
            finally:
                self.device.release(slots)
                with self._lock:
                    self._spilling -= len(slots)
            # A host tier that was written in place has refused what is left for now: all of it is in use.
            stored = [False] * len(pages) if self.below.is_in_place else self.below.put(pages)
            if self.below.has_host:  # this thread may wait for the tiers below
                self.below.write([page for page, done in zip(pages, stored, strict=True) if not done])
            if self._forgotten != forgotten:
                self.below.remove([page.key for _, page in new])
        finally:
            self.below.in_flight.release(mine)

    def _retire(self, keys: Sequence[PageKey]) -> None:
        self.device.retire(keys)
        self.below.retire(keys)

    def _lacking(self, slots: Sequence[int]) -> list[tuple[int, NewPage]]:
        """Return the pages of these slots that not all tiers have."""
        entries = [(slot, NewPage(*entry)) for slot in slots if (entry := self.device.entry(slot)) is not None]
        held = [tier.exists([page.key for _, page in entries]) for tier in self.lower]
        return [entry for entry, has in zip(entries, zip(*held, strict=True), strict=True) if not all(has)]

    def _put_in_host(self, new: Sequence[tuple[int, NewPage]]) -> list[tuple[int, NewPage]]:
        """Copy pages from the device straight to where the host tier keeps them; return those that it did not take."""
        tried: set[int] = set()

        def fill(places: Sequence[int], rows: Sequence[memoryview]) -> list[int | None]:
            tried.update(places)
            return self.device.copy_out([new[place][0] for place in places], rows)

        stored = self.below.put_in_place([page for _, page in new], fill)
        return [new[place] for place, done in enumerate(stored) if not done and place not in tried]

    def _stage(self, new: Sequence[tuple[int, NewPage]]) -> list[Page]:
        """Copy pages from the device to memory of this thread's; what does not come is dropped."""
        if not new:
            return []
        rows = [memoryview(row) for row in self._staging[: len(new)]]
        sums = self.device.copy_out([slot for slot, _ in new], rows)
        with self._lock:
            self._spill_dropped += sums.count(None)
        return [
            Page(page.key, page.meta, row, one)
            for (_, page), row, one in zip(new, rows, sums, strict=True)
            if one is not None
        ]


class _LeadingRun(Future[list[Tier]]):
    """A fetch's future that tells of the leading run alone, and is cancelled with it."""

    def __init__(self, fetched: Future[list[Tier | None]]) -> None:
        super().__init__()
        self._fetched = fetched
        fetched.add_done_callback(self._take)

    def cancel(self) -> bool:
        """Cancel the fetch if it still waits; see ``Future.cancel``."""
        return self._fetched.cancel()

    def _take(self, fetched: Future[list[Tier | None]]) -> None:
        if fetched.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
            return
        run: list[Tier] = []
        for tier in fetched.result():
            if tier is None:
                break
            run.append(tier)
        self.set_result(run)
