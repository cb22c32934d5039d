"""One connection to a Redis or Valkey server, with values going straight between the socket and the caller's memory.

The protocol is RESP 2 (https://redis.io/docs/latest/develop/reference/protocol-spec/), as much of it as keeping pages
takes. A connection belongs to one caller at a time. Whatever goes wrong on it (a deadline, an end, a reply that is no
reply) raises ``ConnectionFault``, and then it must be closed: what it would deliver next may be another's answer.

The socket blocks with a timeout of the kernel's, so that a page is one call (``MSG_WAITALL``) that lets go of the
interpreter's lock once; a client library's buffers and copies cost six times as much.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.codec import checksum

_BUFFER_BYTES = 64 << 10
_NEAR_BYTES = 1 << 10  # read at once where a value may follow: its head, and little of what should go straight
_MAX_PARTS = 512  # of one send; the kernel allows 1024
_REARM_S = 0.005
_LEAST_S = 0.001
_HEAD_LIMIT = 1 << 20
_TIMEVAL = struct.Struct("@ll")


class ConnectionFault(Exception):
    """The connection is of no use any more; the message says why."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What a server answers instead of what it was asked for. ``code`` is its first word."""

    message: str

    @property
    def code(self) -> str:
        """The kind of error, as ``MOVED``."""
        return self.message.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Value:
    """A value that was read. Its last bytes are in the caller's buffer, what came before them is ``head``.

    A value shorter than the buffer fills its beginning; of one too long to be a page nothing is kept. ``body_sum`` is
    the checksum of the whole buffer, taken while it was still near the processor, or ``None``.
    """

    length: int
    head: bytes
    body_sum: int | None = None


Reply = int | bytes | None | ErrorReply | list["Reply"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and who asks: ``path`` of a unix socket, or ``host`` and ``port``."""

    host: str = ""
    port: int = 0
    path: str = ""
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Connection:
    """An open, authenticated connection. Deadlines are of ``time.monotonic``."""

    def __init__(self, address: Address, deadline_s: float) -> None:
        """Connect. Raises ``ConnectionFault``."""
        self._data = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._data)
        self._start = self._stop = 0
        self._armed_s = -1.0
        try:
            self._socket = _open_socket(address, _left_s(deadline_s))
            self._tls = isinstance(self._socket, ssl.SSLSocket)
            self._greet(address, deadline_s)
        except OSError as error:
            raise ConnectionFault(f"cannot connect to {address}: {error.strerror or error}") from error

    def _greet(self, address: Address, deadline_s: float) -> None:
        greetings: list[tuple[bytes, ...]] = []
        if address.password:
            who = (address.username.encode(),) if address.username else ()
            greetings.append((b"AUTH", *who, address.password.encode()))
        if address.database:
            greetings.append((b"SELECT", b"%d" % address.database))
        try:
            for greeting in greetings:
                self.send([command(*greeting)], deadline_s)
                answer = self.reply(deadline_s)
                if isinstance(answer, ErrorReply):
                    raise ConnectionFault(f"{address} refuses {greeting[0].decode()}: {answer.message}")
        except ConnectionFault:
            self.close()
            raise

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is there to be read: an idle connection that ended, or that owes an answer, is not."""
        if self._start != self._stop:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, parts: Sequence[bytes | memoryview], deadline_s: float) -> None:
        """Send the parts, one after the other, without joining them. Raises ``ConnectionFault``."""
        try:
            if self._tls:
                self._arm(deadline_s)
                for part in parts:
                    self._socket.sendall(part)
                return
            for start in range(0, len(parts), _MAX_PARTS):
                self._send_parts([memoryview(part) for part in parts[start : start + _MAX_PARTS]], deadline_s)
        except OSError as error:
            raise ConnectionFault(f"sending failed: {error}") from error

    def _send_parts(self, parts: list[memoryview], deadline_s: float) -> None:
        first = 0
        while first < len(parts):
            self._arm(deadline_s)
            try:
                sent = self._socket.sendmsg(parts[first:])
            except BlockingIOError:
                continue  # the kernel's timeout; arming tells whether that was the deadline
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = parts[first][sent:]

    def reply(self, deadline_s: float) -> Reply:
        """Return the next reply. Raises ``ConnectionFault``."""
        line = self._line(deadline_s, _BUFFER_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace"))
        number = _number(line)
        if kind == b":":
            return number
        if kind == b"$":
            return None if number < 0 else self._bulk(number, deadline_s)
        if kind == b"*":
            return None if number < 0 else [self.reply(deadline_s) for _ in range(number)]
        raise ConnectionFault(f"not a reply: {line[:40]!r}")

    def value_into(self, body: memoryview, deadline_s: float, *, sums: bool = False) -> Value | ErrorReply | None:
        """Read the reply to GET so that the value's last ``len(body)`` bytes are in ``body``; with ``sums`` hash these.

        Raises ``ConnectionFault``.
        """
        line = self._line(deadline_s, _NEAR_BYTES)
        if line[:1] == b"-":
            return ErrorReply(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ConnectionFault(f"not a value: {line[:40]!r}")
        length = _number(line)
        if length < 0:
            return None
        before = max(0, length - len(body))
        if before > _HEAD_LIMIT:
            self._skip(length, deadline_s)
            self._skip(2, deadline_s)
            return Value(length, b"")
        head = bytearray(before)
        self._read_into(memoryview(head), deadline_s)
        self._read_into(body[: length - before], deadline_s)
        body_sum = checksum(body) if sums and length >= len(body) else None
        self._skip(2, deadline_s)
        return Value(length, bytes(head), body_sum)

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    def _bulk(self, length: int, deadline_s: float) -> bytes:
        data = bytearray(length)
        self._read_into(memoryview(data), deadline_s)
        self._skip(2, deadline_s)
        return bytes(data)

    def _line(self, deadline_s: float, most: int) -> bytes:
        """Return the next line, reading at most so many bytes beyond it."""
        while (end := self._data.find(b"\r\n", self._start, self._stop)) < 0:
            if self._start:
                self._data[: self._stop - self._start] = self._data[self._start : self._stop]
                self._start, self._stop = 0, self._stop - self._start
            if self._stop == len(self._data):
                raise ConnectionFault("a line without an end")
            self._stop += self._receive(self._view[self._stop : self._stop + most], deadline_s, whole=False)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _read_into(self, target: memoryview, deadline_s: float) -> None:
        """Fill ``target``: first from what was read already, then straight from the socket."""
        had = min(len(target), self._stop - self._start)
        target[:had] = self._view[self._start : self._start + had]
        self._start += had
        while had < len(target):
            had += self._receive(target[had:], deadline_s, whole=True)

    def _skip(self, count: int, deadline_s: float) -> None:
        """Read over so many bytes; of what follows them, take what is near."""
        while count:
            if self._start == self._stop:
                self._start, self._stop = (
                    0,
                    self._receive(self._view[: max(count, _NEAR_BYTES)], deadline_s, whole=False),
                )
            had = min(count, self._stop - self._start)
            self._start += had
            count -= had

    def _receive(self, target: memoryview, deadline_s: float, *, whole: bool) -> int:
        """Return how many bytes came, at least one; with ``whole`` waiting for all of them where that can be had."""
        while True:
            self._arm(deadline_s)
            try:
                if self._tls:
                    count = self._socket.recv_into(target)
                else:
                    count = self._socket.recv_into(target, 0, socket.MSG_WAITALL if whole else 0)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionFault(f"reading failed: {error}") from error
            if not count:
                raise ConnectionFault("the server ended the connection")
            return count

    def _arm(self, deadline_s: float) -> None:
        """Let the next call of the socket wait until the deadline and not longer."""
        left_s = _left_s(deadline_s)
        if abs(left_s - self._armed_s) < _REARM_S:
            return
        self._armed_s = left_s
        if self._tls:
            self._socket.settimeout(left_s)
            return
        timeout = _TIMEVAL.pack(int(left_s), int(left_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)


def command(*words: bytes) -> bytes:
    """Return a command as it is sent."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)])


def _open_socket(address: Address, timeout_s: float) -> socket.socket:
    if address.path:
        opened = socket.socket(socket.AF_UNIX)
        try:
            opened.settimeout(timeout_s)
            opened.connect(address.path)
        except OSError:
            opened.close()
            raise
    else:
        opened = socket.create_connection((address.host, address.port), timeout_s)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if address.tls:
        return ssl.create_default_context().wrap_socket(opened, server_hostname=address.host)
    opened.settimeout(None)  # the kernel's timeouts from here on; its own buffer sizes are the cheapest, measured
    return opened


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise ConnectionFault("no answer within the deadline")
    return max(left_s, _LEAST_S)


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise ConnectionFault(f"not a reply: {line[:40]!r}") from None
