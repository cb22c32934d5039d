"""The front: whoever connects, the requests that make up the load are served here, everything else by aiohttp.

A connection begins here. A head that this module understands entirely (a ``POST`` to one of a few paths, HTTP/1.1, a
``content-length``, ordinary headers, each once) is served on the spot. At the first one that is anything else, the
connection is given to aiohttp, with all of its bytes since that head, and stays there; aiohttp serves the same paths,
at several times the cost. So there is no second opinion about HTTP's dark corners: they are all on one side.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import cast

from gateway.bodies import BODY_TIMEOUT_S
from gateway.errors import BodyTooSlow
from gateway.relay import ClientGone

Handle = Callable[["Headers", Callable[[], Awaitable[bytes]], "FrontReply"], Awaitable[None]]
"""Serves one request: its headers, what reads its body, the way back."""

MAX_HEAD_BYTES = 1 << 14
"""Longer heads go to aiohttp, which has its own limit, and words for it."""

IDLE_TIMEOUT_S = 75.0
"""A connection is closed on which nothing whole was asked for so long."""

CLIENT_STALL_S = 60.0
"""A client that takes nothing of what is to be sent for so long is given up."""

HIGH_WATER_BYTES = 1 << 16
"""What may wait to be sent, or to be read, on a connection before its source has to wait."""

_HEAD = re.compile(
    rb"POST (/[!-~]*+) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[\t\x20-\x7e\x80-\xff]*+\r\n)++)\r\n"
)
_NOT_HERE = frozenset({"transfer-encoding", "expect", "upgrade", "te", "trailer", "content-encoding", "origin"})
_CHUNKED = b"transfer-encoding: chunked\r\n"
_CLOSING = b"connection: close\r\n"
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class Headers(dict[str, str]):
    """A request's headers by lower-case name, found by a name in any case."""

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """Return the header's value."""
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())


def read_head(data: bytes) -> tuple[str, Headers, int] | None:
    """Return path, headers and body length of a head, with its blank line; ``None`` for what is better left alone."""
    found = _HEAD.fullmatch(data)
    if found is None:
        return None
    headers = Headers()
    for line in found[2].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        key = name.decode("ascii").lower()
        if key in headers:
            return None
        dict.__setitem__(headers, key, value.strip(b" \t").decode("utf-8", "surrogateescape"))
    length = dict.get(headers, "content-length", "")
    keeps = dict.get(headers, "connection", "keep-alive").lower() == "keep-alive"
    if not keeps or not length.isdecimal() or not length.isascii() or len(length) > 12 or "host" not in headers:
        return None
    if not headers.keys().isdisjoint(_NOT_HERE):
        return None
    return found[1].decode("ascii"), headers, int(length)


class Front:
    """Makes the protocol of each connection: hand it to ``loop.create_server``."""

    def __init__(
        self,
        handler_of: Callable[[str], Handle | None],
        others: Callable[[], asyncio.Protocol],
        *,
        body_cap_bytes: int,
        body_timeout_s: float = BODY_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        client_stall_s: float = CLIENT_STALL_S,
    ) -> None:
        """``handler_of`` tells what serves a target; ``others`` makes the protocol that takes everything else."""
        self.handler_of, self.others = handler_of, others
        self.body_cap_bytes, self.body_timeout_s, self.idle_timeout_s = body_cap_bytes, body_timeout_s, idle_timeout_s
        self.client_stall_s = client_stall_s
        self.is_leaving = False
        self.connections: set[FrontConnection] = set()

    def __call__(self) -> FrontConnection:
        """Return the protocol of one more connection."""
        return FrontConnection(self)

    def leave(self) -> None:
        """Close the connections that carry no request; the others close after theirs."""
        self.is_leaving = True
        for connection in list(self.connections):
            connection.close_if_idle()

    async def close(self) -> None:
        """Cut what is left."""
        self.leave()
        tasks = [connection.cut() for connection in list(self.connections)]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


class FrontConnection(asyncio.Protocol):
    """One client's connection, with one request at a time. What it sends ahead waits."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._body: list[bytes] = []
        self._missing = 0  # bytes of the body that have not come
        self._body_waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._drain_waiter: asyncio.Future[None] | None = None
        self._is_behind = False
        self._is_discarding = False
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._unsent = math.inf  # of the last answer, when the clock was looked at last

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connected."""
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        self._front.connections.add(self)
        self._expect(self._front.idle_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Bytes came: of a body, of a head, or ahead of their time."""
        if self._missing:
            data = self._take_body(data)
            if not data:
                return
        self._buffer = self._buffer + data if self._buffer else data
        if self._task is None:
            self._next()
        elif len(self._buffer) > HIGH_WATER_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The client says nothing more; as with aiohttp, it is taken to have left."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone: what was done for it ends."""
        self._forget()
        self._transport = None
        if self._task is not None:
            self._task.cancel()
        for waiter in (self._drain_waiter, self._body_waiter):
            if waiter is not None and not waiter.done():
                waiter.set_exception(ClientGone("the client left"))

    def pause_writing(self) -> None:
        """The client is behind."""
        self._is_behind = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._is_behind = False
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    # --- one request after the other ---

    def _next(self) -> None:
        """Begin with the next request, if its head is whole."""
        buffer, front = self._buffer, self._front
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if not buffer.startswith(b"POST "[: len(buffer)]) or len(buffer) > MAX_HEAD_BYTES:
                self._hand_over()
            return
        read = read_head(buffer[: end + 4])
        handle = front.handler_of(read[0]) if read is not None else None
        if read is None or handle is None or read[2] > front.body_cap_bytes:
            self._hand_over()
            return
        _, headers, self._missing = read
        self._buffer, rest = b"", buffer[end + 4 :]
        if rest:
            self._buffer = self._take_body(rest) if self._missing else rest
        self._expect(None)
        self._task = self._loop.create_task(self._serve(handle, headers))

    async def _serve(self, handle: Handle, headers: Headers) -> None:
        reply = FrontReply(self)
        try:
            await handle(headers, self._read_body, reply)
        finally:
            self._task = None
            self._after(reply)

    def _after(self, reply: FrontReply) -> None:
        """The request was answered: go on, or close."""
        transport = self._transport
        if transport is None:
            return
        if not reply.is_whole:
            transport.abort()
        elif reply.closes or self._front.is_leaving:
            self._discard() if self._missing else transport.close()
        else:
            self._body.clear()
            self._expect(self._front.idle_timeout_s)
            transport.resume_reading()
            if self._missing:
                self._discard()
            elif self._buffer:
                self._next()

    def _discard(self) -> None:
        """Let the rest of an unwanted body come, so that the answer is not lost to a reset, and forget it."""
        self._is_discarding = True
        self._body.clear()
        self._expect(self._front.body_timeout_s)

    def _take_body(self, data: bytes) -> bytes:
        """Take the body's part of what came; return the rest."""
        if len(data) > self._missing:
            data, rest = data[: self._missing], data[self._missing :]
        else:
            rest = b""
        self._missing -= len(data)
        if not self._is_discarding:
            self._body.append(data)
        if not self._missing:
            if self._body_waiter is not None and not self._body_waiter.done():
                self._body_waiter.set_result(None)
            if self._is_discarding:
                self._is_discarding = False
                self._expect(self._front.idle_timeout_s)
                if self._front.is_leaving and self._transport is not None:
                    self._transport.close()
        return rest

    async def _read_body(self) -> bytes:
        """Return the whole body. Raises ``BodyTooSlow``, ``ClientGone``."""
        if self._missing:
            self._body_waiter = self._loop.create_future()
            try:
                async with asyncio.timeout(self._front.body_timeout_s):
                    await self._body_waiter
            except TimeoutError:
                raise BodyTooSlow("the body did not arrive in time") from None
            finally:
                self._body_waiter = None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def _hand_over(self) -> None:
        """Give the connection to aiohttp, and what it said since the last request."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._forget()
        other, data = self._front.others(), self._buffer
        self._buffer = b""
        transport.set_protocol(other)
        other.connection_made(transport)
        transport.resume_reading()
        other.data_received(data)

    # --- what the reply needs ---

    @property
    def is_gone(self) -> bool:
        """Whether nobody is there any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def must_close(self) -> bool:
        """Whether the next answer is the connection's last."""
        return self._front.is_leaving

    def write_soon(self, data: bytes) -> bool:
        """Send, unless the client is behind. Raises ``ClientGone``."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ClientGone("the client left")
        if self._is_behind:
            return False
        transport.write(data)
        return True

    async def write(self, data: bytes) -> None:
        """Send, and wait while the client is behind. Raises ``ClientGone``."""
        while not self.write_soon(data):
            await self._caught_up()

    async def _caught_up(self) -> None:
        """Wait until the client is behind no longer, or takes nothing any more. Raises ``ClientGone``."""
        before = math.inf
        while self._is_behind and (transport := self._transport) is not None:
            unsent = transport.get_write_buffer_size()
            if unsent >= before:
                raise ClientGone("the client takes nothing")
            before, self._drain_waiter = unsent, self._loop.create_future()
            try:
                async with asyncio.timeout(self._front.client_stall_s):
                    await self._drain_waiter
            except TimeoutError:
                pass
            finally:
                self._drain_waiter = None

    # --- ends ---

    def close_if_idle(self) -> None:
        """Close unless a request is on its way."""
        if self._task is None and not self._is_discarding and self._transport is not None:
            self._transport.close()

    def cut(self) -> asyncio.Task[None] | None:
        """Close at once; return what still runs."""
        if self._transport is not None:
            self._transport.abort()
        return self._task

    def _expect(self, within_s: float | None) -> None:
        """Give the client so long for its next whole head (or the rest of a body); ``None``: it is our turn.

        One timer a connection, looked at when it fires: to set one anew at every request would cost more.
        """
        self._deadline, self._unsent = math.inf if within_s is None else self._loop.time() + within_s, math.inf
        if self._timer is None and within_s is not None:
            self._timer = self._loop.call_later(within_s, self._look_at_the_clock)

    def _look_at_the_clock(self) -> None:
        self._timer = None
        if self._transport is None:
            return
        left_s, unsent = self._deadline - self._loop.time(), self._transport.get_write_buffer_size()
        if left_s <= 0 and not unsent:
            self._transport.close()
        elif left_s <= 0 and unsent >= self._unsent:
            self._transport.abort()  # closed, it would stay until all was taken
        elif left_s <= 0:  # its last answer is on its way yet
            self._unsent = unsent
            self._timer = self._loop.call_later(self._front.client_stall_s, self._look_at_the_clock)
        else:
            self._timer = self._loop.call_later(min(left_s, self._front.idle_timeout_s), self._look_at_the_clock)

    def _forget(self) -> None:
        self._front.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class FrontReply:
    """``gateway.relay.Reply`` on such a connection."""

    __slots__ = ("_connection", "closes", "is_started", "is_whole")

    def __init__(self, connection: FrontConnection) -> None:
        self._connection = connection
        self.is_started = False  # whether a status went out
        self.is_whole = False  # whether the answer's end did
        self.closes = False

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer whole. Raises ``RuntimeError`` behind the beginning of a stream, into which no second head may get."""
        if self.is_started:
            raise RuntimeError("a stream has begun")
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
        await self._connection.write(head + body)
        self.is_started = self.is_whole = True

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a stream."""
        await self._connection.write(self._head(status, headers, _CHUNKED))
        self.is_started = True

    def write_soon(self, data: bytes) -> bool:
        """Send a piece, if the client is not behind: whether it was sent. Raises ``ClientGone``."""
        return self._connection.write_soon(b"%x\r\n%b\r\n" % (len(data), data))

    async def write(self, data: bytes) -> None:
        """Send a piece; waits while more than the high-water mark is unsent."""
        await self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def finish(self) -> None:
        """End a stream."""
        await self._connection.write(b"0\r\n\r\n")
        self.is_whole = True

    def _head(self, status: int, headers: Mapping[str, str], framing: bytes) -> bytes:
        self.closes = self._connection.must_close
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}".encode("ascii")]
        for name, value in headers.items():
            line = f"{name}: {value}"
            if "\r" in line or "\n" in line or "\0" in line:
                raise ValueError(f"the header {name!r} cannot be sent")
            lines.append(line.encode("utf-8", "surrogateescape"))
        lines.append(framing + (_CLOSING if self.closes else b""))
        return b"\r\n".join(lines) + b"\r\n"
