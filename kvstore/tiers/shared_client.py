"""An engine's end of the connection to the daemon of a shared host tier: questions with a deadline, and a breaker.

One connection, one question at a time: no page crosses it, so none takes long. A daemon that is late or gone is out of
use at once, and a thread looks for it until it is back.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kvstore.breaker import Breaker, BreakerOptions
from kvstore.deadline import Allowance
from kvstore.memory import ByteRows
from kvstore.tiers.shared_wire import Answer, Frames, Hello, Refused, Reply, Request, Welcome, frame

log = logging.getLogger(__name__)

_TAKEN_BYTES_PER_S = 200e6  # of fresh memory, on a busy machine
LIFE = 1 << 32
"""Slots of one connection's life are told from those of the next by multiples of this."""


@dataclass(frozen=True, slots=True)
class SharedHostOptions:
    """Limits of one engine's share."""

    ask_s: Allowance = field(default_factory=Allowance)  # of one question to the daemon
    follows: bool = False  # hear of changes from the start, though nobody listens yet
    maps: bool = True  # the memory; not for a process that only asks, which can neither get nor put nor lend
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class Connected:
    """One life of the connection: the socket and the memory that came with it."""

    def __init__(self, connection: socket.socket, life: int, fd: int | None, slots: int, page_bytes: int) -> None:
        """``fd``: of the memory; ``None`` leaves it unmapped."""
        self.socket, self.first_slot, self.slots = connection, life * LIFE, slots
        self.frames: Frames[Answer] = Frames(connection, msgspec.msgpack.Decoder(Answer))
        self.views: list[memoryview] = []
        if fd is None:
            return
        area = mmap.mmap(fd, slots * page_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        rows: ByteRows = np.frombuffer(area, dtype=np.uint8).reshape(slots, page_bytes)
        self.views = [memoryview(rows[slot]) for slot in range(slots)]  # who holds one keeps the memory


class SharedClient:
    """Asks the daemon. Thread-safe; raises nothing.

    ``heard`` is told of each reply and ``lost`` of the end of each connection, in order, with the client's lock held;
    ``found`` is told that there is a connection again, from the breaker's thread and not for the first one.
    """

    def __init__(
        self,
        path: Path,
        hello: Callable[[], Hello],
        options: SharedHostOptions,
        *,
        heard: Callable[[Reply], None],
        lost: Callable[[], None],
        found: Callable[[], None],
    ) -> None:
        self._path, self._hello, self._options = path, hello, options
        self._heard, self._lost, self._found = heard, lost, found
        self.lock = threading.Lock()
        self._life = 0
        self._connected: Connected | None = None
        self._closed = False
        self.breaker = Breaker(f"shared host tier {path}", self._probe, options.breaker)
        if not self._probe():
            self.breaker.trip("no daemon answers")

    @property
    def connected(self) -> Connected | None:
        """The connection that there is."""
        return self._connected

    def ask(self, request: Request, of: Connected | None = None) -> tuple[Reply, Connected] | None:
        """Return the daemon's reply and the connection that it is about; ``None`` if there is none, or not the one
        that is named."""
        with self.lock:
            connected = self._connected
            if connected is None or (of is not None and of is not connected) or not self.breaker.closed:
                return None
            try:
                connected.socket.settimeout(self._options.ask_s.seconds())
                connected.socket.sendall(frame(request))
                answer = connected.frames.receive()
            except (OSError, msgspec.DecodeError) as error:
                self._part(f"no answer: {error}")
                return None
            if not isinstance(answer, Reply):
                self._part("the daemon has closed")
                return None
            self._heard(answer)
            return answer, connected

    def send(self, request: Request, of: Connected | None) -> None:
        """Tell the daemon something that has no reply, over the connection that it is about."""
        with self.lock:
            if of is None or of is not self._connected:
                return
            try:
                of.socket.settimeout(self._options.ask_s.seconds())
                of.socket.sendall(frame(request))
            except OSError as error:
                self._part(f"cannot tell it anything: {error}")

    def close(self) -> None:
        """Close the connection, for good. Idempotent."""
        self._closed = True
        self.breaker.stop()
        with self.lock:
            self._part("")

    def _part(self, reason: str) -> None:
        """Give up the connection, and what it held; the caller holds the lock."""
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.socket.close()
            self._lost()
        if reason:
            self.breaker.trip(reason)

    def _probe(self) -> bool:
        """Connect; the breaker's thread does it when the daemon was away."""
        try:
            connected = self._connect()
        except (OSError, msgspec.DecodeError, ValueError) as error:
            log.debug("shared host tier %s: %s", self._path, error)
            return False
        with self.lock:
            if self._closed:
                connected.socket.close()
                return True
            self._connected = connected
        if self._life > 1:
            self._found()
        return True

    def _connect(self) -> Connected:
        hello = self._hello()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fds: list[int] = []
        try:
            memory_s = hello.capacity_bytes / _TAKEN_BYTES_PER_S  # that the daemon may have to take now
            connection.settimeout(self._options.ask_s.seconds() + memory_s)
            connection.connect(str(self._path))
            connection.sendall(frame(hello))
            data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            answer = msgspec.msgpack.decode(data[4:], type=Welcome | Refused)
            if isinstance(answer, Refused) or not fds:
                raise ValueError(answer.reason if isinstance(answer, Refused) else "no memory came along")
            self._life += 1
            fd = fds[0] if self._options.maps else None
            return Connected(connection, self._life, fd, answer.slots, hello.page_bytes)
        except BaseException:
            connection.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
