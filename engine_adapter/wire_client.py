"""The HTTP/1.1 client that speaks to engines: ``asyncio.Protocol``, framed by llhttp, with connections kept.

A client library costs several times what the bytes do, at every chunk of every stream. What engines need of HTTP is
little: one request at a time on a kept connection, whole or chunked answers, a cut when nobody wants the rest. That,
and nothing else, is here; the framing, where mistakes are security holes, is llhttp's.

No cookies, no redirects, no decompression, no proxies from the environment, and one repetition: engines close kept
connections when they like, also at the moment when one is used again. A request that then was never delivered, or that
may be read twice (GET), goes over a new connection, once. Any other may have run, and its sender hears of it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from engine_adapter.errors import ConnectFailed
from engine_adapter.http import KEEP_ALIVE_S, ClientOptions
from engine_adapter.wire_connection import Connection, NotDelivered, Origin, Unanswered, WireResponse

_SWEEP_S = 1.0
_SAFE_METHODS = frozenset({"GET", "HEAD"})


@lru_cache(maxsize=4096)
def _place(url: str) -> tuple[Origin, bytes, bytes]:
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
        origin = Origin(parts.hostname, port or (443 if is_tls else 80), is_tls)
        return origin, target.encode("ascii"), host.encode("ascii")
    except UnicodeError:
        raise ConnectFailed("no connection: the address is not a URL") from None


class WireClient:
    """``UpstreamClient`` of the data plane; an asynchronous context manager, bound to one event loop."""

    def __init__(self, options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._idle: dict[Origin, deque[Connection]] = {}
        self._open: set[Connection] = set()
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
        connection = self._kept(origin)
        if connection is not None:
            try:
                return await connection.ask(head, body or b"")
            except NotDelivered:
                pass
            except Unanswered:
                if method not in _SAFE_METHODS:
                    raise
        connection = await self._connect(origin, connect_timeout_s)
        try:
            return await connection.ask(head, body or b"")
        except NotDelivered as error:
            raise ConnectFailed("no connection: it was closed at once") from error

    def keep(self, connection: Connection) -> None:
        """Take a connection back whose answer was read to its end."""
        if not self._is_open:
            connection.cut()
            return
        connection.idle_since = connection.loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(_SWEEP_S, self._sweep)

    def opened(self, connection: Connection) -> None:
        """A connection came about."""
        self._open.add(connection)

    def lost(self, connection: Connection) -> None:
        """A connection is no more."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def _kept(self, origin: Origin) -> Connection | None:
        """Return the connection that was used last, so that the others grow old."""
        idle = self._idle.get(origin)
        return idle.pop() if idle else None

    async def _connect(self, origin: Origin, timeout_s: float | None) -> Connection:
        loop = asyncio.get_running_loop()
        tls = None
        if origin.is_tls:
            tls = self._tls = self._tls or ssl.create_default_context()
        try:
            async with asyncio.timeout(timeout_s or self._options.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, origin, loop), origin.host, origin.port, ssl=tls
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
