"""The process that looks after workers: makes them, replaces those that die, and brings them down.

It serves nothing and has neither threads nor an event loop: so it can fork again at any time, and what it forks begins
as the first one did. It waits for signals, one at a time. The first worker makes what is not there yet (tables, a
ledger of an older schema); the others begin when it listens. SIGTERM or SIGINT goes to all workers, each of which
drains as a gateway of one process does; a second one ends them at once. A worker that cannot start at first ends all.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gateway.errors import SettingsError
from gateway.home import claimed
from gateway.settings import Settings
from gateway.workers.mesh import socket_pairs
from gateway.workers.place import WorkerPlace
from gateway.workers.shared_metrics import bury

_log = logging.getLogger(__name__)
_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
_PR_SET_PDEATHSIG = 1
_STEADY_S = 10.0
"""A worker that lived so long is replaced at once; others after a pause that doubles."""
_LONGEST_PAUSE_S = 30.0
_LOOK_S = 0.2

Work = Callable[[WorkerPlace, Callable[[], None]], int]
"""What a worker does: serves, calls the function once it listens, returns its exit status."""


@dataclass(slots=True)
class _Worker:
    """One place, and who has it now."""

    place: WorkerPlace
    pid: int | None = None
    started_at: float = 0.0
    due_at: float | None = 0.0  # when to start it; ``None``: it runs, or is not to be started
    pause_s: float = 0.5
    ends: int = 0


@dataclass(slots=True)
class Supervisor:
    """Looks after the workers of one gateway."""

    workers: list[_Worker]
    work: Work
    listens: mmap.mmap
    """One byte a worker: whether it ever listened."""
    is_stopping: bool = False
    statuses: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Return the exit status once all workers are gone: 0 after an orderly end."""
        while True:
            self._start_due()
            told = signal.sigtimedwait(_SIGNALS, _LOOK_S)
            if told is None:
                continue
            if told.si_signo != signal.SIGCHLD:
                if self.is_stopping:
                    self._tell(signal.SIGKILL)
                    self._bury_all()
                    return 130
                self._stop()
            self._reap()
            if self.is_stopping and not any(worker.pid for worker in self.workers):
                return max(self.statuses, default=0)

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            is_first = worker.place.is_first or self.listens[0]
            if worker.due_at is not None and worker.due_at <= now and is_first and not self.is_stopping:
                self._start(worker)

    def _start(self, worker: _Worker) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, number = os.getpid(), worker.place.number
        pid = os.fork()
        if pid == 0:
            _be_child_of(parent)
            os._exit(_status_of(self.work, worker.place, lambda: self._says_listens(number)))
        worker.pid, worker.started_at, worker.due_at = pid, time.monotonic(), None
        _log.info("worker %d is process %d", number, pid)

    def _says_listens(self, number: int) -> None:
        self.listens[number] = 1

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for worker in self.workers:
                if worker.pid == pid:
                    self._ended(worker, pid, os.waitstatus_to_exitcode(status))

    def _bury_all(self) -> None:
        """Wait for those that were killed: it takes no time, and leaves no zombies."""
        for worker in self.workers:
            if worker.pid is not None:
                os.waitpid(worker.pid, 0)

    def _ended(self, worker: _Worker, pid: int, code: int) -> None:
        place, worker.pid = worker.place, None
        bury(place.metrics, place.number, pid)
        if self.is_stopping:
            self.statuses.append(code if code >= 0 else 1)
            return
        if not self.listens[place.number]:
            self.statuses.append(code if code > 0 else 1)
            _log.error("worker %d could not start (%s): the gateway ends", place.number, _said(code))
            self._stop()
            return
        lived_s = time.monotonic() - worker.started_at
        worker.pause_s = 0.0 if lived_s >= _STEADY_S else min(max(2 * worker.pause_s, 0.5), _LONGEST_PAUSE_S)
        worker.due_at, worker.ends = time.monotonic() + worker.pause_s, worker.ends + 1
        _log.error("worker %d (process %d) ended (%s); another begins in %g s",
                   place.number, pid, _said(code), worker.pause_s)  # fmt: skip

    def _stop(self) -> None:
        self.is_stopping = True
        self._tell(signal.SIGTERM)

    def _tell(self, number: signal.Signals) -> None:
        for worker in self.workers:
            if worker.pid is not None:
                os.kill(worker.pid, number)


def supervise(settings: Settings, work: Work) -> int:
    """Run as many workers as the settings say, until a signal; return the exit status. Raises ``SettingsError``.

    The process must have no threads.
    """
    count = settings.server.workers
    folder = settings.home / "workers"
    with claimed(settings.home), _held_port(settings.server.host, settings.server.port) as port, _waiting_for_signals():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        ends = socket_pairs(count)
        workers = [_Worker(_place(number, count, port, folder, ends)) for number in range(count)]
        try:
            return Supervisor(workers, work, mmap.mmap(-1, max(count, 1))).run()
        finally:
            for end in ends.values():
                end.close()
            shutil.rmtree(folder, ignore_errors=True)


def _place(number: int, count: int, port: int, folder: Path, ends: dict[tuple[int, int], socket.socket]) -> WorkerPlace:
    lines = {b: end for (a, b), end in ends.items() if a == number}
    return WorkerPlace(number, count, port, folder, lines)


@contextmanager
def _held_port(host: str, port: int) -> Iterator[int]:
    """Hold the port for the workers, so that no other gateway is let in between. Raises ``SettingsError``."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as alone:  # the port may be shared by our own workers only
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
        holder = socket.socket(family, kind, proto)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    with holder:
        yield int(holder.getsockname()[1])


@contextmanager
def _waiting_for_signals() -> Iterator[None]:
    """Keep the signals for ``sigtimedwait``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_child_of(parent: int) -> None:
    """Get signals again, not those of the terminal, and end when the supervisor does."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _status_of(work: Work, place: WorkerPlace, listens: Callable[[], None]) -> int:
    """Return how a worker ends. Whatever it raises must not run on into the supervisor's code."""
    try:
        return work(place, listens)
    except BaseException:  # a worker's main
        logging.getLogger(__name__).exception("worker %d failed", place.number)
        return 1
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()


def _said(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
