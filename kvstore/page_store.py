"""The tiers below an engine's own memory, on the caller's buffers: what a plug-in for any engine is built on.

``get`` and ``exists`` answer within a deadline and never raise for a fault of a medium. ``put`` copies into the host
tier and returns; disk and pool are written behind, straight from there. What exceeds the bytes that may wait is not
written further down, and counted. Without a host tier a put is a synchronous write, since a caller's buffer is its own
again when the call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.deadline import Allowance
from kvstore.fetching import BufferTarget, Fetcher, OnRead, Target, report
from kvstore.in_flight import InFlight
from kvstore.page import Namespace, PageKey, Tier
from kvstore.tiers.base import Page, PageTier, TierStats
from kvstore.tiers.host import HostTier, Loan
from kvstore.tiers.slotted import check_buffers

Complete = Callable[[list[Page], float], list[Page]]
"""Gives pages what is known of them only after they were put, before they are written behind; may wait.

Takes the pages and when they were put, of ``time.monotonic``; returns as many, with the same keys and bytes.
"""


class WritePolicy(StrEnum):
    """Which pages go below the host tier."""

    THROUGH = "through"  # every page, at once
    SELECTIVE = "selective"  # pages that were wanted again: found in the host tier, or put a second time


@dataclass(frozen=True, slots=True)
class PageStoreOptions:
    """Limits of one store."""

    get_s: Allowance = field(default_factory=Allowance)
    write_policy: WritePolicy = WritePolicy.THROUGH
    fetch_threads: int = 2
    window_bytes: int = 8 << 20  # moved at once: the staging memory of each thread
    behind_bytes: int = 256 << 20  # accepted by put and not yet on disk and pool
    promotes: bool = True  # pages that were read from below into the host tier


class PageStore:
    """Host, disk and pool of one layout, any of them, fastest first. Thread-safe."""

    def __init__(
        self,
        tiers: Sequence[PageTier],
        options: PageStoreOptions | None = None,
        *,
        on_read: OnRead | None = None,
        complete: Complete | None = None,
    ) -> None:
        """The store closes the tiers. ``on_read`` is told of every read of disk and pool, from any thread; ``complete``
        is asked by the thread that writes behind.

        Raises ``ValueError`` for tiers in disorder or of different page sizes.
        """
        if [tier.tier for tier in tiers] != sorted({tier.tier for tier in tiers}):
            raise ValueError("tiers go from fast to slow, one of each")
        if len({tier.page_bytes for tier in tiers}) > 1:
            raise ValueError("tiers of different page sizes")
        self.options = options if options is not None else PageStoreOptions()
        self.tiers = tuple(tiers)
        self._page_bytes = tiers[0].page_bytes if tiers else 0
        self._host = next((tier for tier in tiers if isinstance(tier, HostTier) and tier.tier is Tier.HOST), None)
        self._below = tuple(tier for tier in tiers if tier is not self._host)
        self.in_flight = InFlight()
        self._fetcher = Fetcher(
            tiers,
            self.in_flight,
            threads=self.options.fetch_threads,
            window_bytes=self.options.window_bytes,
            promotes=self.options.promotes,
            on_read=on_read,
        )
        self._complete = complete
        self._window = max(1, self.options.window_bytes // max(1, self._page_bytes))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-behind")
        self._lock = threading.Condition()
        self._behind_pages = 0
        self._dropped = 0
        self._closed = False

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """Tell for each key whether some tier would probably deliver it. Slower tiers are asked only for the rest."""
        return [tier is not None for tier in self.locate(keys)]

    def locate(self, keys: Sequence[PageKey], *, among: Collection[Tier] | None = None) -> list[Tier | None]:
        """Return the fastest tier that would probably deliver each page, of all or of these tiers."""
        places: list[Tier | None] = [None] * len(keys)
        for tier in self.tiers:
            if among is not None and tier.tier not in among:
                continue
            asked = [place for place, known in enumerate(places) if known is None]
            if not asked:
                break
            for place, has in zip(asked, tier.exists([keys[place] for place in asked]), strict=True):
                if has:
                    places[place] = tier.tier
        return places

    def match(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading pages are there."""
        there = self.exists(keys)
        return there.index(False) if False in there else len(there)

    def get(
        self, keys: Sequence[PageKey], out: Sequence[memoryview], *, timeout_s: float | None = None
    ) -> list[Tier | None]:
        """Fill ``out[i]`` with the page of ``keys[i]``; name the tier that each came from, ``None`` for a miss.

        Ends within ``timeout_s`` (by default what the options allow for so many bytes). A buffer that was not filled
        has unspecified content, and none is written after the call.
        """
        check_buffers(keys, out, self._page_bytes)
        allowed_s = self.options.get_s.seconds(len(keys) * self._page_bytes) if timeout_s is None else timeout_s
        found = self.start_get(keys, [BufferTarget(buffer) for buffer in out], timeout_s=allowed_s).result()
        if self.options.write_policy is WritePolicy.SELECTIVE:
            self._write_behind([key for key, tier in zip(keys, found, strict=True) if tier is Tier.HOST])
        return found

    def start_get(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[Target],
        *,
        timeout_s: float,
        to_first_gap: bool = False,
    ) -> Future[list[Tier | None]]:
        """Do what ``get`` does, in the background and to any target; see ``Fetcher.start``."""
        deadline_s = time.monotonic() + timeout_s
        return self._fetcher.start(keys, targets, deadline_s=deadline_s, to_first_gap=to_first_gap)

    def stop_fetching(self) -> None:
        """Answer every get that waits with what it has, and those to come with nothing. Idempotent."""
        self._fetcher.close()

    def put(self, pages: Sequence[Page]) -> list[bool]:
        """Store pages; ``True`` for each that ``get`` finds from now on. Never waits for disk or pool behind a host.

        ``False`` is for what finds the host tier full of pages in use, or waiting to be written.
        """
        if self._closed:
            return [False] * len(pages)
        if self._host is None:
            return self.write(pages)
        selective = self.options.write_policy is WritePolicy.SELECTIVE
        again = self._host.exists([page.key for page in pages]) if selective else [True] * len(pages)
        stored = self._host.put(pages)
        self._write_behind([page.key for page, a, b in zip(pages, stored, again, strict=True) if a and b])
        return stored

    def wait_for_room(self, pages: int, timeout_s: float) -> bool:
        """Wait until so many pages more may be put with none of them dropped; ``False`` if that takes longer."""
        most = self.options.behind_bytes // max(1, self._page_bytes)
        with self._lock:
            return self._lock.wait_for(lambda: self._closed or self._behind_pages + pages <= most, timeout_s)

    def write(self, pages: Sequence[Page]) -> list[bool]:
        """Store pages in every tier before returning; ``True`` for each that some tier has."""
        mine, _ = self.in_flight.claim([page.key for page in pages])
        try:
            answers = [tier.put(pages) for tier in self.tiers]
        finally:
            self.in_flight.release(mine)
        return [any(each) for each in zip(*answers, strict=True)] if answers else [False] * len(pages)

    def remove(self, keys: Sequence[PageKey]) -> int:
        """Forget pages in every tier; return how many some tier had."""
        there = self.exists(keys)
        for tier in self.tiers:
            tier.remove(keys)
        return sum(there)

    def clear(self) -> None:
        """Forget every page of this layout in every tier, in the pool for every client of the server."""
        for tier in self.tiers:
            tier.clear()

    def forget(self, namespace: Namespace) -> int:
        """Forget a namespace in every tier; return how many pages of all tiers that were."""
        return sum(tier.forget(namespace) for tier in self.tiers)

    def pin(self, keys: Sequence[PageKey]) -> list[bool]:
        """Protect pages from eviction in every tier that has them, counted; ``False`` where none has."""
        answers = [tier.pin(keys) for tier in self.tiers]
        return [any(each) for each in zip(*answers, strict=True)] if answers else [False] * len(keys)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Release one pin of each page in every tier."""
        for tier in self.tiers:
            tier.unpin(keys)

    def retire(self, keys: Sequence[PageKey]) -> None:
        """The run that these pages belong to has ended: in every tier they go before all others."""
        for tier in self.tiers:
            tier.retire(keys)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far is written behind; ``False`` if it takes longer."""
        with self._lock:
            if self._closed:
                return True
            marker = self._writer.submit(lambda: None)
        try:
            marker.result(timeout_s)
        except FutureTimeoutError:
            return False
        return True

    @property
    def has_host(self) -> bool:
        """Whether a put stays in memory."""
        return self._host is not None

    @property
    def dropped(self) -> int:
        """Pages that were not written behind because too many waited."""
        return self._dropped

    def stats(self) -> dict[Tier, TierStats]:
        """Return each tier's counters; pages that were not written behind are ``dropped`` of the first tier below."""
        counters = {tier.tier: tier.stats() for tier in self.tiers}
        if self._below:
            counters[self._below[0].tier].dropped += self._dropped
        return counters

    def check(self) -> None:
        """Verify every tier's invariants; raises ``AssertionError``."""
        for tier in self.tiers:
            tier.check()

    def close(self) -> None:
        """Finish what was accepted, answer what waits with what it has, close every tier. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.stop_fetching()
        self._writer.shutdown(wait=True)
        for tier in self.tiers:
            tier.close()

    def _write_behind(self, keys: Sequence[PageKey]) -> None:
        """Queue pages of the host tier for the tiers below; what exceeds the bound is dropped, last pages first.

        They stay in the host tier until they are written.
        """
        if self._host is None or not keys or not self._below:
            return
        loan = self._host.lend(keys)
        with self._lock:
            room = max(0, self.options.behind_bytes // self._page_bytes - self._behind_pages)
            accepted = 0 if self._closed else min(room, len(loan.pages))
            self._dropped += len(keys) - accepted
            self._behind_pages += accepted
            if accepted:
                taken = Loan(loan.pages[:accepted], loan.slots[:accepted])
                self._writer.submit(self._run_behind, taken, time.monotonic()).add_done_callback(report)
        self._host.take_back(Loan(loan.pages[accepted:], loan.slots[accepted:]))

    def _run_behind(self, loan: Loan, put_s: float) -> None:
        """The writer's work: window after window, straight from the host tier's memory."""
        assert self._host is not None
        try:
            for start in range(0, len(loan.pages), self._window):
                pages = loan.pages[start : start + self._window]
                if self._complete is not None:
                    pages = self._complete(pages, put_s)
                for tier in self._below:
                    tier.put(pages)
        finally:
            self._host.take_back(loan)
            with self._lock:
                self._behind_pages -= len(loan.pages)
                self._lock.notify_all()
