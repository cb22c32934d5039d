"""The listening socket: the front on it, aiohttp behind that, TLS around both if there is to be any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from gateway.errors import SettingsError
from gateway.front import Front
from gateway.http import Edge, ShapedRequestHandler, protocol_log
from gateway.tls import Certificate, TlsOptions

LAST_WORDS_S = 5.0
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where and how. ``is_shared``: other workers of this gateway listen on the same port, and the kernel deals out
    connections."""

    host: str
    port: int
    body_cap_bytes: int
    is_shared: bool = False
    tls: TlsOptions | None = None


@asynccontextmanager
async def listening(
    app: web.Application, edge: Edge, options: ListenOptions
) -> AsyncIterator[tuple[str, Callable[[], object]]]:
    """Take connections within the block; yields the URL, and what stops taking more. Raises ``SettingsError``."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=LAST_WORDS_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        certificate = None if options.tls is None else Certificate(options.tls)
        assert runner.server is not None
        connection = partial(
            ShapedRequestHandler,
            runner.server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # it is what AppRunner passes for none
            auto_decompress=False,  # it would run on the loop, without a limit; the edge refuses what is compressed
            logger=protocol_log,
        )
        front = Front(edge.front_handler, connection, body_cap_bytes=options.body_cap_bytes)
        stack.push_async_callback(front.close)
        try:
            server = await loop.create_server(
                front,
                options.host,
                options.port,
                backlog=_BACKLOG,
                reuse_port=options.is_shared or None,
                ssl=None if certificate is None else certificate.context,
            )
        except OSError as error:
            raise SettingsError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
        stack.callback(server.close)

        def stop() -> None:
            server.close()
            front.leave()

        if certificate is not None:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(certificate.run(), name="certificate").cancel)
        shown = f"[{options.host}]" if ":" in options.host else options.host
        scheme = "http" if certificate is None else "https"
        yield f"{scheme}://{shown}:{server.sockets[0].getsockname()[1]}", stop
