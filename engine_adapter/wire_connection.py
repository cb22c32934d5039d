"""One connection to an engine, with at most one request on it, and the answer that comes over it.

Framed by llhttp. What it knows of a request that went wrong is what a retry rests on: that it was never delivered
(``NotDelivered``), or that it may have been read.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from engine_adapter.errors import AnswerTooLong, UpstreamBroken
from engine_adapter.http import READ_BYTES

_MAX_HEAD_BYTES = 1 << 16
_NO_BODY = frozenset({204, 304})
_ACKED_AT, _INFO_BYTES, _ESTABLISHED = 120, 128, 1
"""Where the kernel's ``struct tcp_info`` (linux/tcp.h) has ``tcpi_bytes_acked``, 8 bytes, where the SYN counts as one;
and what ``tcpi_state``, its first byte, is while neither side has said its last."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a connection leads to."""

    host: str
    port: int
    is_tls: bool


class NotDelivered(UpstreamBroken):
    """The other side had closed a kept connection before a byte of the request was there: nobody can have read it."""


class Unanswered(UpstreamBroken):
    """A kept connection ended without a byte of an answer; the request may have been read."""


class Keeper(Protocol):
    """Who owns connections."""

    def opened(self, connection: Connection) -> None:
        """A connection came about."""

    def keep(self, connection: Connection) -> None:
        """Take a connection back whose answer was read to its end."""

    def lost(self, connection: Connection) -> None:
        """A connection is no more."""


class WireResponse:
    """An answer whose head has arrived: see ``UpstreamResponse``."""

    __slots__ = ("_buffered", "_connection", "_ended", "_error", "_pieces", "_take", "_waiter", "headers", "status")

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection: Connection | None = connection
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._ended = False
        self._error: UpstreamBroken | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes, well or badly."""
        return self._ended

    async def read_some(self) -> bytes:
        """Return what has arrived, at least a byte; ``b""`` at the end. Raises ``UpstreamBroken``, ``TimeoutError``."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            connection = self._connection
            if connection is None:
                raise UpstreamBroken("the answer was closed")
            self._waiter = connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._buffered = 0
        if self._connection is not None:
            self._connection.flow(wanted=True)
        return data

    async def read_all(self, limit_bytes: int) -> bytes:
        """Return the rest of the body. Raises ``UpstreamBroken``, ``AnswerTooLong``."""
        pieces, total = [], 0
        while piece := await self.read_some():
            total += len(piece)
            if total > limit_bytes:
                raise AnswerTooLong(f"the answer is longer than {limit_bytes} bytes")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def interrupt(self) -> None:
        """Let a ``read_some`` that waits raise ``TimeoutError``; nothing is lost, it may be called again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def carry(self, take: Callable[[bytes], None] | None) -> None:
        """Let ``take`` have what comes while somebody waits in ``read_some``, who then sleeps on; ``None``: nobody."""
        self._take = take

    def give_up(self) -> None:
        """Let whoever reads it find it broken off, now."""
        if not self._ended:
            self.ended(UpstreamBroken("the answer was given up"))

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else cut it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave(whole=self._ended and self._error is None)

    def came(self, data: bytes) -> int:
        """Take in a piece; return how many bytes wait to be read."""
        if self._take is not None and self._waiter is not None and not self._waiter.done():
            self._take(data)
            return 0
        self._pieces.append(data)
        self._buffered += len(data)
        self._wake()
        return self._buffered

    def ended(self, error: UpstreamBroken | None = None) -> None:
        """Nothing more comes."""
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    __slots__ = (
        "_acked_at_end",
        "_acked_before",
        "_client",
        "_head_bytes",
        "_is_keepable",
        "_is_paused",
        "_is_reused",
        "_is_until_close",
        "_parser",
        "_response",
        "_sent_bytes",
        "_transport",
        "_waiter",
        "idle_since",
        "loop",
        "origin",
    )

    def __init__(self, client: Keeper, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self.origin, self.loop = client, origin, loop
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._response: WireResponse | None = None
        self._waiter: asyncio.Future[WireResponse] | None = None
        self._is_paused = self._is_until_close = self._is_reused = False
        self._is_keepable = True
        self._head_bytes = self._sent_bytes = 0
        self._acked_before: int | None = None  # by the other side's kernel, when the request was sent
        self._acked_at_end: int | None = None  # when the other side had said its last
        self._parser = httptools.HttpResponseParser(self)

    # --- what the client does with it ---

    async def ask(self, head: bytes, body: bytes) -> WireResponse:
        """Send a request and wait for its answer's head. Raises ``UpstreamBroken``, one of its kinds above where no
        byte of an answer came. Cancelling cuts the connection."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise NotDelivered("no answer: the connection was closed")
        self._is_reused, self._acked_before = self._sent_bytes > 0, 1 + self._sent_bytes
        if self.origin.is_tls:  # whose own bytes nobody has counted, and whose end is not always told
            state, self._acked_before = _wire(transport)
            if state not in (_ESTABLISHED, None):
                self.cut()
                raise NotDelivered("no answer: the other side had closed the connection")
        self._sent_bytes += len(head) + len(body)
        self._response, self._head_bytes, self._is_until_close = WireResponse(self), 0, False
        self._waiter = self.loop.create_future()
        if len(body) > 1 << 14:
            transport.write(head)
            transport.write(body)
        else:
            transport.write(head + body)
        try:
            return await self._waiter
        except BaseException:
            self.cut()
            raise
        finally:
            self._waiter = None

    def leave(self, *, whole: bool) -> None:
        """The answer is done with. A connection that holds the rest of one is cut."""
        self._response = None
        transport = self._transport
        if (
            whole
            and self._is_keepable
            and not self._is_until_close
            and transport is not None
            and not transport.is_closing()
        ):
            self.flow(wanted=True)
            self._client.keep(self)
        else:
            self.cut()

    def cut(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def flow(self, *, wanted: bool) -> None:
        """Go on reading, or wait for a slow reader."""
        if self._is_paused is wanted and self._transport is not None and not self._transport.is_closing():
            self._is_paused = not wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        """Bytes came: an answer's, or, on an idle connection, nothing that anybody asked for."""
        if self._response is None:
            self.cut()
            return
        self._head_bytes += len(data) if self._awaits_head else 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break("the answer is not HTTP")
            return
        if self._head_bytes > _MAX_HEAD_BYTES and self._awaits_head:
            self._break("the answer's head has no end")

    def eof_received(self) -> None:
        """The other side says nothing more; the transport closes then."""
        if self._awaits_head and self._transport is not None:
            _, self._acked_at_end = _wire(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone. An answer without a length ends so; any other is broken."""
        self._client.lost(self)
        if isinstance(error, BrokenPipeError) and not self.origin.is_tls:  # a write met an end that nobody had read yet
            self.eof_received()  # the descriptor is still the connection's; under TLS it may be somebody else's by now
        self._transport = None
        if self._response is not None and self._is_until_close and error is None:
            self._finish()
        else:
            self._break(type(error).__name__ if error is not None else "the connection was closed")

    # --- llhttp ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, one of several perhaps."""
        response = self._awaited()
        if response is not None:
            key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
            known = response.headers.get(key)
            response.headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        """The head is there."""
        response = self._awaited()
        if response is None:
            return
        response.status = self._parser.get_status_code()
        if response.status < 200:
            return
        headers = response.headers
        has_length = "content-length" in headers or headers.get("transfer-encoding", "").lower().endswith("chunked")
        self._is_until_close = not has_length and response.status not in _NO_BODY
        self._is_keepable = self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(response)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        response = self._awaited()
        if response is not None and response.came(data) > READ_BYTES:
            self.flow(wanted=False)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        response = self._awaited()
        if response is not None and response.status < 200:  # an interim answer; the real one follows
            response.headers.clear()
            response.status = 0
        elif not self._is_until_close:
            self._finish()

    def _awaited(self) -> WireResponse | None:
        """Return the answer that is coming; a second one on the same request is nobody's, and the connection's last."""
        if self._response is not None and not self._response.has_ended:
            return self._response
        self._is_keepable = False
        return None

    # --- ends ---

    def _finish(self) -> None:
        if self._response is not None:
            self._response.ended()

    def _break(self, why: str) -> None:
        error = self._failure(why)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        if self._response is not None:
            self._response.ended(error)
        self.cut()

    @property
    def _awaits_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _failure(self, why: str) -> UpstreamBroken:
        """Return what became of the request. Bytes that a kernel has not acknowledged when its side says its last were
        not there then, and nobody reads what comes later."""
        if self._awaits_head and not self._head_bytes:
            before, at_end = self._acked_before, self._acked_at_end
            if before is not None and at_end is not None and at_end <= before:
                return NotDelivered("no answer: the other side had closed the connection")
            if self._is_reused:
                return Unanswered(f"no answer: {why}")
        return UpstreamBroken(f"the answer broke off: {why}")


def _wire(transport: asyncio.BaseTransport) -> tuple[int | None, int | None]:
    """Return the state of a TCP connection and how much of what was sent the other side's kernel has acknowledged;
    ``None`` where no one can tell."""
    wire = transport.get_extra_info("socket")
    if wire is None or sys.platform != "linux":
        return None, None
    try:
        told = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None, None
    if len(told) < _INFO_BYTES:
        return None, None
    return told[0], int.from_bytes(told[_ACKED_AT:_INFO_BYTES], sys.byteorder)
