"""The HTTP/1.1 client that speaks to engines: ``asyncio.Protocol``, framed by llhttp, with connections kept.

A client library costs several times what the bytes do, at every chunk of every stream. What engines need of HTTP is
little: one request at a time on a kept connection, whole or chunked answers, a cut when nobody wants the rest. That,
and nothing else, is here; the framing, where mistakes are security holes, is llhttp's.

No cookies, no redirects, no decompression, no proxies from the environment, no retries.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from engine_adapter.errors import AnswerTooLong, ConnectFailed, UpstreamBroken
from engine_adapter.http import KEEP_ALIVE_S, READ_BYTES, ClientOptions

_SWEEP_S = 1.0
_MAX_HEAD_BYTES = 1 << 16
_NO_BODY = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a connection leads to."""

    host: str
    port: int
    is_tls: bool


@lru_cache(maxsize=4096)
def _place(url: str) -> tuple[_Origin, bytes, bytes]:
    """Return an address's origin, its request target and its ``Host``. Raises ``ConnectFailed`` for what is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConnectFailed("no connection: the address is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConnectFailed("no connection: the address is not an http(s) URL")
    is_tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.netloc.rpartition("@")[2]
    try:
        origin = _Origin(parts.hostname, port or (443 if is_tls else 80), is_tls)
        return origin, target.encode("ascii"), host.encode("ascii")
    except UnicodeError:
        raise ConnectFailed("no connection: the address is not a URL") from None


class WireClient:
    """``UpstreamClient`` of the data plane; an asynchronous context manager, bound to one event loop."""

    def __init__(self, options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._idle: dict[_Origin, deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._open):
            connection.cut()

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        connect_timeout_s: float | None = None,
    ) -> WireResponse:
        """Send and wait for the answer's head; see ``UpstreamClient``."""
        if not self._is_open:
            raise RuntimeError("the client is not open")
        origin, target, host = _place(url)
        head = _head(method, target, host, headers, body)
        connection = self._kept(origin) or await self._connect(origin, connect_timeout_s)
        return await connection.ask(head, body or b"")

    def keep(self, connection: _Connection) -> None:
        """Take a connection back whose answer was read to its end."""
        if not self._is_open:
            connection.cut()
            return
        connection.idle_since = connection.loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(_SWEEP_S, self._sweep)

    def opened(self, connection: _Connection) -> None:
        """A connection came about."""
        self._open.add(connection)

    def lost(self, connection: _Connection) -> None:
        """A connection is no more."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def _kept(self, origin: _Origin) -> _Connection | None:
        """Return the connection that was used last, so that the others grow old."""
        idle = self._idle.get(origin)
        return idle.pop() if idle else None

    async def _connect(self, origin: _Origin, timeout_s: float | None) -> _Connection:
        loop = asyncio.get_running_loop()
        tls = None
        if origin.is_tls:
            tls = self._tls = self._tls or ssl.create_default_context()
        try:
            async with asyncio.timeout(timeout_s or self._options.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, origin, loop), origin.host, origin.port, ssl=tls
                )
        except TimeoutError:
            raise ConnectFailed("no connection: timed out") from None
        except OSError as error:  # ssl.SSLError is one
            raise ConnectFailed(f"no connection: {error.strerror or type(error).__name__}") from error
        return connection

    def _sweep(self) -> None:
        """Close what has been idle for too long, oldest first, in each origin."""
        self._sweeper, kept = None, 0
        for idle in self._idle.values():
            while idle and idle[0].loop.time() - idle[0].idle_since > KEEP_ALIVE_S:
                idle.popleft().cut()
            kept += len(idle)
        if kept and self._is_open:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


def _head(method: str, target: bytes, host: bytes, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return a request's head. Raises ``ValueError`` for a header that would break out of its line."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode("ascii"), target, host)]
    for name, value in headers.items():
        line = f"{name}: {value}"
        if "\r" in line or "\n" in line or "\0" in line:
            raise ValueError(f"the header {name!r} cannot be sent")
        lines.append(line.encode("utf-8", "surrogateescape") + b"\r\n")
    if body is not None:
        lines.append(b"content-length: %d\r\n" % len(body))
    lines.append(b"\r\n")
    return b"".join(lines)


class WireResponse:
    """An answer whose head has arrived: see ``UpstreamResponse``."""

    __slots__ = ("_buffered", "_connection", "_ended", "_error", "_pieces", "_waiter", "headers", "status")

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._ended = False
        self._error: UpstreamBroken | None = None
        self._waiter: asyncio.Future[None] | None = None

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


class _Connection(asyncio.Protocol):
    """One connection, with at most one request on it. The callbacks without docstrings are llhttp's."""

    __slots__ = (
        "_client",
        "_head_bytes",
        "_is_keepable",
        "_is_paused",
        "_is_until_close",
        "_parser",
        "_response",
        "_transport",
        "_waiter",
        "idle_since",
        "loop",
        "origin",
    )

    def __init__(self, client: WireClient, origin: _Origin, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self.origin, self.loop = client, origin, loop
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._response: WireResponse | None = None
        self._waiter: asyncio.Future[WireResponse] | None = None
        self._is_paused = self._is_until_close = False
        self._is_keepable = True
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    # --- what the client does with it ---

    async def ask(self, head: bytes, body: bytes) -> WireResponse:
        """Send a request and wait for its answer's head. Cancelling cuts the connection."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise UpstreamBroken("no answer: the connection was closed")
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
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break("the answer is not HTTP")
            return
        if self._waiter is not None and not self._waiter.done():
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._break("the answer's head has no end")

    def eof_received(self) -> None:
        """The other side says nothing more; the transport closes then."""

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone. An answer without a length ends so; any other is broken."""
        self._client.lost(self)
        self._transport = None
        if self._response is not None and self._is_until_close and error is None:
            self._finish()
        else:
            self._break(type(error).__name__ if error is not None else "the connection was closed")

    # --- llhttp ---

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._awaited()
        if response is not None:
            key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
            known = response.headers.get(key)
            response.headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
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
        response = self._awaited()
        if response is not None and response.came(data) > READ_BYTES:
            self.flow(wanted=False)

    def on_message_complete(self) -> None:
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
        error = UpstreamBroken(f"the answer broke off: {why}")
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        if self._response is not None:
            self._response.ended(error)
        self.cut()
