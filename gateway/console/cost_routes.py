"""Costs over HTTP: the ledger's report as a page and as files."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from billing.reports import render_csv, render_json
from gateway.access.roles import Right
from gateway.console.answers import HEADERS, forbidden, page
from gateway.console.costs import DIMENSIONS, WINDOWS, CostQuery, cost_report, cost_totals
from gateway.console.frame import query_href, render
from gateway.console.sources import Sources

_FORMS: Final = {"csv": (render_csv, "text/csv"), "json": (render_json, "application/json")}


class CostRoutes:
    """See the module."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def routes(self) -> list[web.RouteDef]:
        """Its address."""
        return [web.get("/console/cost", self._cost)]

    async def _cost(self, request: web.Request) -> web.Response:
        visitor, sources = self._sources.visitor_of(request), self._sources
        if not visitor.may(Right.SEE_COSTS):
            return forbidden(visitor, Right.SEE_COSTS)
        query = CostQuery.of(request.query.get("by", ""), request.query.get("window", ""), visitor.tenant)
        now_ns, form = sources.clock(), request.query.get("form")
        if form in _FORMS:
            write, content_type = _FORMS[form]
            report = await asyncio.to_thread(cost_report, sources.report_of, query, now_ns)
            headers = HEADERS | {"Content-Disposition": f'attachment; filename="cost.{form}"'}
            return web.Response(text=write(report), content_type=content_type, charset="utf-8", headers=headers)
        totals = await asyncio.to_thread(cost_totals, sources.report_of, query, now_ns)
        html = render(
            "cost.html",
            visitor,
            totals=totals,
            query=query,
            dimensions=DIMENSIONS,
            windows=WINDOWS,
            downloads=query_href("/console/cost", by=query.by, window=query.window),
        )
        return page(html)
