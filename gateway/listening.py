"""The listening socket: the front on it, aiohttp behind that, TLS around both if there is to be any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from gateway.errors import SettingsError
from gateway.front import CLIENT_STALL_S, IDLE_TIMEOUT_S, Front
from gateway.http import Edge, ShapedRequestHandler, protocol_log
from gateway.tls import Certificate, TlsOptions

LAST_WORDS_S = 5.0
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where and how. ``is_shared``: other workers of this gateway listen on the same port, and the kernel deals out
    connections. ``idle_timeout_s``: a connection on which nothing whole was asked for so long is closed;
    ``client_stall_s``: one on which something is to be sent and nothing is taken."""

    host: str
    port: int
    body_cap_bytes: int
    is_shared: bool = False
    tls: TlsOptions | None = None
    idle_timeout_s: float = IDLE_TIMEOUT_S
    client_stall_s: float = CLIENT_STALL_S


class Door:
    """The place to listen at, which is taken before anything is begun that costs time, and opened once all is there."""

    def __init__(self, options: ListenOptions) -> None:
        """Raises ``SettingsError`` for a certificate that is none."""
        self.options = options
        self.certificate = None if options.tls is None else Certificate(options.tls)
        self._server: asyncio.Server | None = None
        self._connection: Callable[[], asyncio.BaseProtocol] | None = None

    async def take(self) -> None:
        """Bind; nobody can connect yet. Raises ``SettingsError`` where somebody else listens there."""
        options = self.options
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connected,
                options.host,
                options.port,
                backlog=_BACKLOG,
                reuse_port=options.is_shared or None,
                ssl=None if self.certificate is None else self.certificate.context,
                start_serving=False,
            )
        except OSError as error:
            raise _cannot(options, error) from None

    async def open(self, connection: Callable[[], asyncio.BaseProtocol]) -> str:
        """Take connections; return the URL. Raises ``SettingsError`` where somebody else listens there by now."""
        assert self._server is not None
        self._connection = connection
        try:
            await self._server.start_serving()
        except OSError as error:
            raise _cannot(self.options, error) from None
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{host}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Take no more connections, and leave the place. Idempotent."""
        if self._server is not None:
            self._server.close()

    def _connected(self) -> asyncio.BaseProtocol:
        assert self._connection is not None
        return self._connection()


@asynccontextmanager
async def taken(options: ListenOptions) -> AsyncIterator[Door]:
    """Hold the place to listen at within the block. Raises ``SettingsError``."""
    door = Door(options)
    await door.take()
    try:
        yield door
    finally:
        door.close()


@asynccontextmanager
async def listening(app: web.Application, edge: Edge, door: Door) -> AsyncIterator[tuple[str, Callable[[], object]]]:
    """Take connections within the block; yields the URL, and what stops taking more. Raises ``SettingsError``."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=LAST_WORDS_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        connection = partial(
            ShapedRequestHandler,
            runner.server,
            loop=loop,
            keepalive_timeout=door.options.idle_timeout_s,  # which aiohttp counts from the connection's start, too
            access_log=None,  # type: ignore[arg-type]  # it is what AppRunner passes for none
            auto_decompress=False,  # it would run on the loop, without a limit; the edge refuses what is compressed
            logger=protocol_log,
        )
        front = Front(
            edge.front_handler,
            connection,
            body_cap_bytes=door.options.body_cap_bytes,
            idle_timeout_s=door.options.idle_timeout_s,
            client_stall_s=door.options.client_stall_s,
        )
        stack.push_async_callback(front.close)
        url = await door.open(front)
        stack.callback(door.close)

        def stop() -> None:
            door.close()
            front.leave()

        if door.certificate is not None:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(door.certificate.run(), name="certificate").cancel)
        yield url, stop


def _cannot(options: ListenOptions, error: OSError) -> SettingsError:
    return SettingsError(f"cannot listen on {options.host}:{options.port}: {error.strerror}")
