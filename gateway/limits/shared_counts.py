"""Counts in memory that all workers of a machine share: a file of fixed size, mapped, with a lock of the kernel's.

A request's counts are looked up, judged and written under the lock in some microseconds, on the event loop: no thread,
no server, no system call but the lock's two. The kernel gives the lock up with the process. One that is killed in
between leaves at worst part of one request counted, until its minute ends. Counts of requests at once are kept by
worker, so that those of one that died are known and forgotten.

The table is open addressing over 65,536 places of 40 bytes; a place is taken over when its minute is long over, or
nobody is in it. A table so full that a count finds none of its places free is an outage, to which rules have their
answer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from gateway.limits.rules import WINDOW_S, CountsUnavailable, Resource, Take, Taken, Verdict

PLACES = 1 << 16
_PROBES = 16
_MAGIC = b"keepwarm counts 1\0\0\0\0\0\0\0"
_PLACE = struct.Struct("<16sqqq")
"""Name; start of the window, or for requests at once when it was written (ns); count; worker + 1 (0: everybody's)."""
_EMPTY = bytes(16)
_MOST_KNOWN = 1 << 17


class SharedCounts:
    """The store, for one worker of so many. Used by one event loop; nothing in it waits."""

    def __init__(
        self,
        path: Path,
        *,
        worker: int = 0,
        workers: int = 1,
        deadline_s: float = 0.1,
        window_s: int = WINDOW_S,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path, self._worker, self._workers = path, worker, workers
        self._deadline_s, self._window_ns, self._clock = deadline_s, window_s * 10**9, clock
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        self._names: dict[str, tuple[bytes, int]] = {}  # of each count: its name in the table, and where it was last

    async def open(self) -> None:
        """Map the table, made if need be, and forget what a former life of this worker had under way.

        Raises ``CountsUnavailable`` where the file cannot be used.
        """
        size = len(_MAGIC) + PLACES * _PLACE.size
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                if os.fstat(self._file).st_size != size or os.pread(self._file, len(_MAGIC), 0) != _MAGIC:
                    os.ftruncate(self._file, 0)
                    os.ftruncate(self._file, size)
                    os.pwrite(self._file, _MAGIC, 0)
                self._map = mmap.mmap(self._file, size)
                self._forget_own()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as error:
            raise CountsUnavailable(f"counts in {self._path}: {error.strerror}") from error

    async def reserve(self, takes: Sequence[Take]) -> Verdict:
        """See ``gateway.limits.rules.CountStore``."""
        start_ns = self._clock()
        start_ns -= start_ns % self._window_ns
        self._lock()
        try:
            found = [self._look(take, start_ns) for take in takes]
            for take, (_, taken_ns, _, used) in zip(takes, found, strict=True):
                if used + take.amount > take.rule.amount:
                    return Verdict((), full=Taken(take, taken_ns, used))
            for take, (at, taken_ns, own, _) in zip(takes, found, strict=True):
                self._write(at, take, taken_ns, own + take.amount)
            return Verdict(
                [Taken(take, taken_ns, used + take.amount)
                 for take, (_, taken_ns, _, used) in zip(takes, found, strict=True)]
            )  # fmt: skip
        finally:
            self._unlock()

    def settle(self, taken: Sequence[Taken], amounts: Sequence[int]) -> None:
        """See ``gateway.limits.rules.CountStore``."""
        try:
            self._lock()
        except CountsUnavailable:
            return
        try:
            for one, amount in zip(taken, amounts, strict=True):
                at = self._find(one.take)
                _, start_ns, used, _ = _PLACE.unpack_from(self._mapped(), at)
                if start_ns == one.start_ns or not one.start_ns:
                    self._write(at, one.take, one.start_ns, max(used + amount - one.take.amount, 0))
        finally:
            self._unlock()

    async def close(self) -> None:
        """Unmap it."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # --- places ---

    def _look(self, take: Take, start_ns: int) -> tuple[int, int, int, int]:
        """Return a count's place, its window, what stands there, and what counts against the limit."""
        at = self._find(take)
        _, known_ns, own, _ = _PLACE.unpack_from(self._mapped(), at)
        if take.rule.resource is Resource.CONCURRENCY:
            others = sum(self._of_worker(take, n) for n in range(self._workers) if n != self._worker)
            return at, 0, own, own + others
        if known_ns < start_ns:
            return at, start_ns, 0, 0
        return at, known_ns, own, own

    def _of_worker(self, take: Take, worker: int) -> int:
        counter, table = f"{take.rule.counter}|{worker}", self._mapped()
        name, at = self._names.get(counter) or (_digest(counter), 0)
        if at:
            found, _, used, _ = _PLACE.unpack_from(table, at)
            if found == name:
                return int(used)
        for at in _places(name):
            found, _, used, _ = _PLACE.unpack_from(table, at)
            if found == name:
                self._know(counter, name, at)
                return int(used)
            if found == _EMPTY:
                break
        return 0

    def _find(self, take: Take) -> int:
        """Return the place of a count; one that has none is given one. Raises ``CountsUnavailable``."""
        rule = take.rule
        counter = f"{rule.counter}|{self._worker}" if rule.resource is Resource.CONCURRENCY else rule.counter
        name, at = self._names.get(counter) or (_digest(counter), 0)
        if not at or self._mapped()[at : at + 16] != name:
            at = self._search(name)
            self._know(counter, name, at)
        return at

    def _know(self, counter: str, name: bytes, at: int) -> None:
        if len(self._names) >= _MOST_KNOWN:
            self._names.clear()
        self._names[counter] = (name, at)

    def _search(self, name: bytes) -> int:
        table, free, now_ns = self._mapped(), -1, self._clock()
        long_ago_ns = now_ns - 2 * self._window_ns
        for at in _places(name):
            found, start_ns, used, owner = _PLACE.unpack_from(table, at)
            if found == name:
                return at
            if free < 0 and (found == _EMPTY or (start_ns < long_ago_ns and not (owner and used))):
                free = at
            if found == _EMPTY:  # a place that was once taken never looks so again: the name is nowhere behind it
                break
        if free < 0:
            raise CountsUnavailable("the table of counts is full")
        _PLACE.pack_into(table, free, name, now_ns - self._window_ns, 0, 0)  # a window that is over, and not for long
        return free

    def _write(self, at: int, take: Take, start_ns: int, used: int) -> None:
        table, owner = self._mapped(), 0
        if take.rule.resource is Resource.CONCURRENCY:
            start_ns, owner = self._clock(), self._worker + 1  # when it was last touched
        _PLACE.pack_into(table, at, table[at : at + 16], start_ns, used, owner)

    def _forget_own(self) -> None:
        table = self._mapped()
        for at in range(len(_MAGIC), len(table), _PLACE.size):
            name, start_ns, used, owner = _PLACE.unpack_from(table, at)
            if owner == self._worker + 1 and used:
                _PLACE.pack_into(table, at, name, start_ns, 0, owner)

    # --- the lock ---

    def _lock(self) -> None:
        """Wait for the lock, whose holders have it for microseconds, up to the deadline."""
        file = self._file
        if file is None:
            raise CountsUnavailable("the table of counts is not open")
        until = None
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                now = time.monotonic()
                until = now + self._deadline_s if until is None else until
                if now >= until:
                    raise CountsUnavailable("the table of counts is held by somebody who does not go on") from None
                os.sched_yield()

    def _unlock(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise CountsUnavailable("the table of counts is not open")
        return self._map


def _digest(counter: str) -> bytes:
    return blake2b(counter.encode(errors="surrogatepass"), digest_size=16).digest()


def _places(name: bytes) -> Iterator[int]:
    first = int.from_bytes(name[:4], "little")
    return (len(_MAGIC) + (first + step) % PLACES * _PLACE.size for step in range(_PROBES))
