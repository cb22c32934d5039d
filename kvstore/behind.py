"""Writing behind a caller's back: pages of the host tier on their way to disk and pool, or kept from it for now.

Pages are written straight out of the host tier's own memory, pinned there until it is done. What may wait is bounded in
bytes; what exceeds the bound is not written, and counted. A page that was removed or forgotten while it waited is not
written, and one that was forgotten while it was being written is removed again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from itertools import groupby

from kvstore.fetching import report
from kvstore.page import PageKey
from kvstore.tiers.base import Page, PageTier
from kvstore.tiers.host import LendingTier, Loan

Complete = Callable[[list[Page], float], list[Page]]
"""Gives pages what is known of them only after they were put, before they are written behind; may wait.

Takes the pages and when they were put, of ``time.monotonic``; returns as many, with the same keys and bytes.
"""


@dataclass(frozen=True, slots=True)
class BehindOptions:
    """Limits of what waits, in pages. ``window_pages`` are written at once."""

    window_pages: int
    behind_pages: int
    back_pages: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A page that was put and is written later, if at all."""

    page: Page
    slot: int
    put_s: float


class Behind:
    """One thread that writes, and the pages that it has not been given yet. Thread-safe."""

    def __init__(
        self, host: LendingTier, below: Sequence[PageTier], options: BehindOptions, complete: Complete | None = None
    ) -> None:
        self._host = host
        self._below = tuple(below)
        self._options = options
        self._complete = complete
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-behind")
        self._lock = threading.Condition()
        self._kept: OrderedDict[PageKey, _Kept] = OrderedDict()  # oldest first; pinned in the host tier
        self._waiting = 0  # pages that the writer has been given
        self._dropped = 0
        self._spared = 0
        self._closed = False

    @property
    def dropped(self) -> int:
        """Pages that were not written because too many waited."""
        return self._dropped

    @property
    def spared(self) -> int:
        """Pages that were kept from being written until nobody wanted them any more."""
        return self._spared

    @property
    def kept(self) -> int:
        """Pages that are in the host tier alone for now."""
        return len(self._kept)

    def write(self, keys: Sequence[PageKey]) -> None:
        """Give the writer pages of the host tier; what exceeds the bound is dropped, last pages first."""
        if keys and self._below:
            loan = self._host.lend(keys)
            with self._lock:
                self._dropped += len(keys) - len(loan.pages)
            self._submit(loan, time.monotonic(), is_bounded=True)

    def keep(self, keys: Sequence[PageKey]) -> None:
        """Let pages of the host tier wait there; those that are more than may wait so are written, oldest first."""
        if not self._below:
            return
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._kept]
        loan, now_s = self._host.lend(new), time.monotonic()
        again: list[_Kept] = []
        with self._lock:
            for page, slot in zip(loan.pages, loan.slots, strict=True):
                kept = _Kept(page, slot, now_s)
                if self._closed or page.key in self._kept:
                    again.append(kept)
                else:
                    self._kept[page.key] = kept
            due = [self._kept.popitem(last=False)[1] for _ in range(len(self._kept) - self._options.back_pages)]
        self._host.take_back(_loan(again))
        self._submit_kept(due, is_bounded=True)

    def let_go(self, keys: Iterable[PageKey]) -> None:
        """These need not be written any more, if they have not been."""
        with self._lock:
            gone = [kept for key in keys if (kept := self._kept.pop(key, None)) is not None]
            self._spared += len(gone)
        self._host.take_back(_loan(gone))

    def let_go_of_removed(self) -> None:
        """Do ``let_go`` with what the host tier has been told to forget."""
        with self._lock:
            keys = list(self._kept)
        there = self._host.exists(keys)
        self.let_go(key for key, has in zip(keys, there, strict=True) if not has)

    def wait_for_room(self, pages: int, timeout_s: float) -> bool:
        """Wait until the writer may be given so many pages more; ``False`` if that takes longer."""
        most = self._options.behind_pages
        with self._lock:
            return self._lock.wait_for(lambda: self._closed or self._waiting + pages <= most, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was given or kept so far is written; ``False`` if it takes longer."""
        self._give_all()
        with self._lock:
            if self._closed:
                return True
            marker = self._writer.submit(lambda: None)
        try:
            marker.result(timeout_s)
        except FutureTimeoutError:
            return False
        return True

    def close(self) -> None:
        """Write what was given and kept; then nothing more. Idempotent."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._give_all(is_last=True)
        self._writer.shutdown(wait=True)

    def _give_all(self, *, is_last: bool = False) -> None:
        """Give the writer what is kept: it is bounded already."""
        with self._lock:
            kept = list(self._kept.values())
            self._kept.clear()
        self._submit_kept(kept, is_bounded=False, is_last=is_last)

    def _submit_kept(self, kept: Sequence[_Kept], *, is_bounded: bool, is_last: bool = False) -> None:
        for put_s, group in groupby(kept, key=lambda one: one.put_s):
            self._submit(_loan(list(group)), put_s, is_bounded=is_bounded, is_last=is_last)

    def _submit(self, loan: Loan, put_s: float, *, is_bounded: bool, is_last: bool = False) -> None:
        with self._lock:
            room = max(0, self._options.behind_pages - self._waiting) if is_bounded else len(loan.pages)
            accepted = 0 if self._closed and not is_last else min(room, len(loan.pages))
            self._dropped += len(loan.pages) - accepted
            self._waiting += accepted
            if accepted:
                taken = Loan(loan.pages[:accepted], loan.slots[:accepted])
                self._writer.submit(self._run, taken, put_s).add_done_callback(report)
        self._host.take_back(Loan(loan.pages[accepted:], loan.slots[accepted:]))

    def _run(self, loan: Loan, put_s: float) -> None:
        """The writer's work: window after window, straight from the host tier's memory."""
        window = self._options.window_pages
        try:
            for start in range(0, len(loan.pages), window):
                self._write(loan.pages[start : start + window], put_s)
        finally:
            self._host.take_back(loan)
            with self._lock:
                self._waiting -= len(loan.pages)
                self._lock.notify_all()

    def _write(self, pages: list[Page], put_s: float) -> None:
        # Pinned pages leave the host tier only by being removed or forgotten, there first and below after it.
        pages = self._still_there(pages)
        if pages and self._complete is not None:
            pages = self._complete(pages, put_s)
        if not pages:
            return
        for tier in self._below:
            tier.put(pages)
        left = {page.key for page in self._still_there(pages)}
        forgotten = [page.key for page in pages if page.key not in left]
        if forgotten:
            for tier in self._below:
                tier.remove(forgotten)

    def _still_there(self, pages: list[Page]) -> list[Page]:
        there = self._host.exists([page.key for page in pages])
        return [page for page, has in zip(pages, there, strict=True) if has]


def _loan(kept: Sequence[_Kept]) -> Loan:
    return Loan([one.page for one in kept], [one.slot for one in kept])
