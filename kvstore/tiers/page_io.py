"""Many pages between memory and a file at once, hashed as they arrive.

A disk gives its bandwidth only to those who keep several requests on their way. Where the loop is compiled, one thread
does that through the kernel's asynchronous I/O and hashes each run while the next ones are coming; elsewhere a few
threads do, with ``preadv`` and ``pwritev``. Runs are neighbouring pages of a file, moved by one request.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kvstore.codec import checksum
from kvstore.memory import is_aligned, is_own, page_rows

try:  # where there was a C compiler at installation
    from kvstore import _pages
except ImportError:
    _pages = None  # type: ignore[assignment]

_LEAST_COMPILED = 241  # bytes of a page
_DOCK_BYTES, _RUN_BYTES = 32 << 20, 512 << 10  # of all requests that read by way of our memory; of one, mostly
_MAX_BUFFERS = 512  # of one request; the kernel allows 1024
LATE = -errno.ETIMEDOUT


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring pages. ``offset`` is the first one's place in the file."""

    offset: int
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a run: bytes moved, or a negative errno (``LATE``: not begun in time); hashes of what was read."""

    result: int
    sums: Sequence[int]


class PageIO(Protocol):
    """Moves runs. Thread-safe; returns once no buffer is in use any more, and raises nothing of the medium's."""

    def move(
        self, runs: Sequence[Run], *, fd: int, direct_fd: int | None, write: bool, deadline_s: float
    ) -> list[Moved]:
        """Read or write runs, over ``direct_fd`` where buffers are aligned, else over ``fd``.

        No run begins after ``deadline_s``, of ``time.monotonic``.
        """

    def close(self) -> None:
        """Release threads and queues."""


def page_io(page_bytes: int, depth: int) -> PageIO:
    """Return the best there is here, for ``depth`` runs on their way at once."""
    if _pages is not None and page_bytes >= _LEAST_COMPILED:
        try:
            return KernelQueue(depth, min(_DOCK_BYTES, depth * max(page_bytes, _RUN_BYTES)))
        except OSError:
            pass  # a kernel or a sandbox without asynchronous I/O
    return ThreadedIO(min(depth, 4))


class KernelQueue:
    """The compiled loop over Linux's native asynchronous I/O. One queue a caller; queues are kept for the next.

    A disk may fill memory in large pages two to four times as fast as memory in small ones: a request is one piece
    instead of hundreds. Ours is in large pages; into somebody else's we read by way of ours (the dock), for one caller
    at a time, since the copy is the pass that hashes. To write so would take a pass of its own.
    """

    def __init__(self, depth: int, dock_bytes: int = _DOCK_BYTES) -> None:
        """Raises ``OSError`` where the kernel has none to give, ``MediumError`` without memory."""
        self._depth = depth
        self._idle: queue.SimpleQueue[_pages.Queue] = queue.SimpleQueue()
        self._idle.put(_pages.queue(depth))
        self._dock = memoryview(page_rows(1, dock_bytes)[0])
        self._dock_turn = threading.Lock()

    def move(
        self, runs: Sequence[Run], *, fd: int, direct_fd: int | None, write: bool, deadline_s: float
    ) -> list[Moved]:
        """See ``PageIO``."""
        buffers: list[memoryview] = []
        firsts, offsets = [], []
        for run in runs:
            firsts.append(len(buffers))
            offsets.append(run.offset)
            buffers += run.buffers
        try:
            kernel_queue = self._idle.get_nowait()
        except queue.Empty:
            try:
                kernel_queue = _pages.queue(self._depth)
            except OSError:  # the kernel's queues are all taken: wait for one of ours
                kernel_queue = self._idle.get()
        direct = -1 if direct_fd is None else direct_fd
        deadline_ns = int(deadline_s * 1e9)
        docks = not write and direct_fd is not None and self._is_foreign(buffers)
        docks = docks and self._dock_turn.acquire(blocking=False)
        dock = self._dock if docks else None
        try:
            results, sums = _pages.transfer(
                kernel_queue, fd, direct, write, buffers, firsts, offsets, self._depth, deadline_ns, dock
            )
        finally:
            if docks:
                self._dock_turn.release()
            self._idle.put(kernel_queue)
        stops = [*firsts[1:], len(buffers)]
        return [Moved(results[i], sums[firsts[i] : stops[i]]) for i in range(len(runs))]

    @staticmethod
    def _is_foreign(buffers: Sequence[memoryview]) -> bool:
        """Tell whether these are somebody else's. Those of one call are of one place."""
        return bool(buffers) and not (is_own(buffers[0]) and is_own(buffers[-1]))

    def close(self) -> None:
        """See ``PageIO``. Queues go with their last reference."""


class ThreadedIO:
    """The same with vectored calls in threads."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-disk")

    def move(
        self, runs: Sequence[Run], *, fd: int, direct_fd: int | None, write: bool, deadline_s: float
    ) -> list[Moved]:
        """See ``PageIO``."""
        call: Callable[[int, Sequence[memoryview], int], int] = os.pwritev if write else os.preadv

        def one(run: Run) -> Moved:
            if time.monotonic() >= deadline_s:
                return Moved(LATE, [0] * len(run.buffers))
            own_fd = direct_fd if direct_fd is not None and all(map(is_aligned, run.buffers)) else fd
            try:
                result = call(own_fd, run.buffers, run.offset)
            except OSError as error:
                return Moved(-(error.errno or errno.EIO), [0] * len(run.buffers))
            left = result
            sums = []
            for buffer in run.buffers:
                left -= len(buffer)
                sums.append(0 if write or left < 0 else checksum(buffer))
            return Moved(result, sums)

        return [one(run) for run in runs] if len(runs) <= 1 else list(self._threads.map(one, runs))

    def close(self) -> None:
        """See ``PageIO``."""
        self._threads.shutdown()


def neighbours(slots: Sequence[int], *, page_bytes: int, run_bytes: int) -> Iterator[list[int]]:
    """Yield the places in ``slots``, each once, in runs of neighbours of at most ``run_bytes`` (or one page)."""
    longest = max(1, min(run_bytes // page_bytes, _MAX_BUFFERS))
    run: list[int] = []
    for place in sorted(range(len(slots)), key=slots.__getitem__):
        if run and (len(run) == longest or slots[place] != slots[run[-1]] + 1):
            yield run
            run = []
        run.append(place)
    if run:
        yield run
