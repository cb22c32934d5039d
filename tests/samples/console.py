"""A console over given sources, for whoever a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from gateway.access.roles import ALL_RIGHTS, Right
from gateway.console.routes import Console
from gateway.console.sources import Sources
from gateway.console.visitor import Visitor
from gateway.http import errors_in_shape
from tracing.store import TraceStore


def visitor(tenant: str | None = None, *rights: Right) -> Visitor:
    """Return an admin, or somebody of a tenant who may do everything but administer, or just ``rights``."""
    own = ALL_RIGHTS if tenant is None else ALL_RIGHTS - {Right.ADMINISTER}
    return Visitor(tenant, frozenset(rights) or own, "tester", "word")


def console_app(traces: TraceStore, who: Visitor | None = None, **sources: object) -> web.Application:
    """Return an application with a console that runs. ``sources``: further ones of ``Sources``."""
    seen_by = visitor() if who is None else who
    sources.setdefault("visitor_of", lambda _: seen_by)
    console = Console(Sources(traces, **sources))  # type: ignore[arg-type]
    app = web.Application(middlewares=[errors_in_shape])
    app.add_routes(console.routes())

    async def live(_: web.Application) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(console.run())
            yield
            task.cancel()

    app.cleanup_ctx.append(live)
    return app
