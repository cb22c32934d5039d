"""Lost hits over HTTP: of a run, or of a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from billing.calendar import HOUR_NS
from billing.errors import BillingError
from gateway.access.roles import Right
from gateway.console.answers import download, forbidden, form_of, page
from gateway.console.breaks import break_data, breaks_view
from gateway.console.frame import query_href, render
from gateway.console.sources import Sources
from gateway.console.visitor import Visitor
from gateway.diagnosis.cards import BreakCard, diagnose
from tracing.errors import TracingError
from tracing.record import RequestRecord

WINDOWS: Final = {"1h": HOUR_NS, "24h": 24 * HOUR_NS, "7d": 7 * 24 * HOUR_NS}
MAX_RECORDS: Final = 20_000


@dataclass(frozen=True, slots=True)
class _Asked:
    run_id: str
    window: str
    tenant: str | None


class BreakRoutes:
    """See the module. One diagnosis at a time: it takes a core for a second."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._turn = asyncio.Semaphore(1)

    def routes(self) -> list[web.RouteDef]:
        """Its address."""
        return [web.get("/console/breaks", self._breaks)]

    async def _breaks(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        asked = _asked(request, visitor)
        trouble, cards, steps = None, list[BreakCard](), 0
        try:
            async with self._turn:
                cards, steps, is_cut = await asyncio.to_thread(self._cards, asked)
        except (TracingError, BillingError) as error:
            trouble, is_cut = str(error), False
        if trouble is None and (form := form_of(request)) is not None:
            return download(break_data(cards), form, "breaks")
        html = render(
            "breaks.html",
            visitor,
            view=breaks_view(cards, steps),
            asked=asked,
            trouble=trouble,
            most=MAX_RECORDS if is_cut else None,
            windows=(("1h", "Last hour"), ("24h", "Last 24 hours"), ("7d", "Last 7 days")),
            downloads_href=query_href(
                "/console/breaks", run=asked.run_id, window=asked.window, tenant=request.query.get("tenant", "")
            ),
        )
        return page(html, 200 if trouble is None else 400)

    def _cards(self, asked: _Asked) -> tuple[list[BreakCard], int, bool]:
        """Return the cards, how many steps were looked at, and whether older ones were left out. What a run could have
        hit is judged by all that came in its time."""
        traces, tenant, until_ns = self._sources.traces, asked.tenant, None
        since_ns = self._sources.clock() - WINDOWS[asked.window]
        if asked.run_id:
            outline = traces.outline(asked.run_id, tenant)
            if outline is None:
                return [], 0, False
            summary = outline.summary
            tenant, since_ns, until_ns = summary.tenant, summary.first_ns, summary.last_ns + 1
        records: list[RequestRecord] = []
        is_cut = False
        for record in traces.arrived(since_ns, until_ns):
            if tenant in (None, record.identity.tenant):
                records.append(record)
            if len(records) > 2 * MAX_RECORDS:
                records, is_cut = records[-MAX_RECORDS:], True
        wanted = {
            record.request_id
            for record in records
            if not asked.run_id or (record.link is not None and record.link.run_id == asked.run_id)
        }
        details = traces.details(record.request_id for record in records)
        restarts = traces.lives(since_ns, until_ns)
        found = diagnose(records, details, self._sources.books(), restarts=restarts)
        return [card for card in found if card.request_id in wanted], len(wanted), is_cut


def _asked(request: web.Request, visitor: Visitor) -> _Asked:
    window = request.query.get("window", "")
    tenant = (request.query.get("tenant") or None) if visitor.tenant is None else visitor.tenant
    return _Asked(request.query.get("run", "").strip()[:200], window if window in WINDOWS else "24h", tenant)
