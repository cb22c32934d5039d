"""The console over HTTP: aiohttp routes that read what they show in threads and answer with pages.

Whoever mounts these routes decides who may see them: ``Sources.visitor_of`` is asked on every request, so no address
shows the run of another tenant, and each page asks for its right.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from billing.errors import LedgerUnavailable
from gateway.console.admin_routes import AdminRoutes
from gateway.console.answers import HEADERS, away, missing
from gateway.console.assets import assets
from gateway.console.break_routes import BreakRoutes
from gateway.console.cost_routes import CostRoutes
from gateway.console.fleet_routes import FleetRoutes
from gateway.console.live_routes import LiveRoutes
from gateway.console.run_routes import RunRoutes
from gateway.console.sources import Sources
from gateway.console.visitor import EVERYBODY
from gateway.console.whatif_routes import WhatIfRoutes
from tracing.errors import TraceStoreUnavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Console:
    """Everything under ``/console``. ``run`` must be running for open pages to be told what changes."""

    def __init__(self, sources: Sources) -> None:
        runs = RunRoutes(sources)
        self._live = LiveRoutes(sources, runs)
        self._parts = (
            self._live,
            runs,
            CostRoutes(sources),
            BreakRoutes(sources),
            FleetRoutes(sources),
            WhatIfRoutes(sources),
            AdminRoutes(sources),
        )
        self.live = self._live.live

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application's router."""
        found = [_patient(route) for part in self._parts for route in part.routes()]
        return [*found, web.get("/console/static/{name}", _asset), web.get("/console/{rest:.*}", _missing)]

    async def run(self) -> None:
        """Tell open pages what changes, until cancelled."""
        await self.live.run()


def _patient(route: web.RouteDef) -> web.RouteDef:
    """Say it on a page where a database is away: servers of a fleet come back."""
    handler: Handler = route.handler

    async def handled(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except TraceStoreUnavailable:
            return away(EVERYBODY, "traces")
        except LedgerUnavailable:
            return away(EVERYBODY, "the ledger")

    return web.route(route.method, route.path, handled, **route.kwargs)


async def _asset(request: web.Request) -> web.Response:
    asset = assets().get(request.match_info["name"])
    if asset is None:
        return missing(EVERYBODY, "such file")
    age = "max-age=31536000, immutable" if request.query.get("v") == asset.digest else "no-cache"
    return web.Response(
        body=asset.body, content_type=asset.content_type, charset="utf-8", headers=HEADERS | {"Cache-Control": age}
    )


async def _missing(request: web.Request) -> web.Response:
    return missing(EVERYBODY, "such page")
