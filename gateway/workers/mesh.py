"""What workers tell each other: messages over socket pairs that were there before any of them.

The supervisor makes one pair for every two workers and keeps both ends open, so that a worker that comes in the place
of a dead one finds its lines as they were, and what was said meanwhile. Messages keep their bounds and their order, and
are there for the other side when ``tell`` returns: whoever reads all that waits before it decides knows everything that
was told before. A line whose other end does not read is full after some hundred kilobytes; what does not fit is dropped
and counted, since nobody may wait for a worker that hangs.

Both ends are this program, forked from one process: messages are pickled.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 17
_SEND_BUFFER_BYTES = 1 << 20

Handler = Callable[..., object]
"""Called with the number of the worker that speaks, and what it says."""


def socket_pairs(workers: int) -> dict[tuple[int, int], socket.socket]:
    """Return for every two workers (a, b) the end that a has of their line."""
    ends: dict[tuple[int, int], socket.socket] = {}
    for a in range(workers):
        for b in range(a + 1, workers):
            ends[a, b], ends[b, a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends.values():
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return ends


class Mesh:
    """One worker's lines to the others. Used by one event loop."""

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        self._lines = dict(lines)
        self._handlers: dict[str, Handler] = {}
        self._later: list[bytes] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dropped = 0

    def on(self, kind: str, handler: Handler) -> None:
        """Have messages of a kind handled."""
        self._handlers[kind] = handler

    def open(self) -> None:
        """Read from now on, also what was told before."""
        self._loop = asyncio.get_running_loop()
        for other, line in self._lines.items():
            self._loop.add_reader(line, self._read, other)

    def close(self) -> None:
        """Read no more. The sockets stay, for whoever comes next."""
        if self._loop is not None:
            for line in self._lines.values():
                self._loop.remove_reader(line)
            self._loop = None

    def tell(self, kind: str, *words: Any) -> None:
        """Tell all others; it is there when this returns. Never waits, never raises for a line that is full."""
        self._flush()
        self._send(_packed([(kind, words)]))

    def tell_soon(self, kind: str, *words: Any) -> None:
        """Tell all others with what else there is to tell in this round of the loop."""
        if not self._later and self._loop is not None:
            self._loop.call_soon(self._flush)
        self._later.append(pickle.dumps((kind, words), pickle.HIGHEST_PROTOCOL))

    def catch_up(self) -> None:
        """Handle everything that was told until now."""
        for other in self._lines:
            self._read(other)

    def _flush(self) -> None:
        if self._later:
            waiting, self._later = self._later, []
            size, some = 0, list[bytes]()
            for message in waiting:
                if some and size + len(message) > _MOST_BYTES // 2:
                    self._send(pickle.dumps(some, pickle.HIGHEST_PROTOCOL))
                    size, some = 0, []
                some.append(message)
                size += len(message)
            self._send(pickle.dumps(some, pickle.HIGHEST_PROTOCOL))

    def _send(self, packet: bytes) -> None:
        if len(packet) > _MOST_BYTES:
            self.dropped += len(self._lines)
            return
        for line in self._lines.values():
            try:
                line.send(packet)
            except OSError:  # full, most likely: its reader hangs
                self.dropped += 1

    def _read(self, other: int) -> None:
        line = self._lines[other]
        while True:
            try:
                packet = line.recv(_MOST_BYTES)
            except OSError:
                return
            if not packet:
                return
            for message in pickle.loads(packet):
                kind, words = pickle.loads(message)
                handler = self._handlers.get(kind)
                if handler is not None:
                    handler(other, *words)


def _packed(messages: list[tuple[str, tuple[Any, ...]]]) -> bytes:
    packed = [pickle.dumps(message, pickle.HIGHEST_PROTOCOL) for message in messages]
    return pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)
