"""Runs over HTTP: the list, one run, two of its steps, one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from billing.calendar import HOUR_NS
from gateway.access.roles import Right
from gateway.console.answers import (
    HEADERS,
    download,
    forbidden,
    form_of,
    missing,
    nano_units,
    page,
    percentage,
    whole_number,
)
from gateway.console.frame import render
from gateway.console.pages import RunsQuery, diff_page, request_page, run_page, runs_page
from gateway.console.run_views import STEPS_PER_PAGE, CalledRun, RunPart, called_tree, pages_of
from gateway.console.sources import Sources
from gateway.console.step_views import OUTCOMES
from gateway.console.views import summary_row
from gateway.console.visitor import Visitor
from tracing.errors import AmbiguousRunError
from tracing.record import RequestRecord
from tracing.store import RunFilter, RunKey, RunSummary
from tracing.store_outline import RunCall
from tracing.store_schema import encode_record

RUNS_PER_PAGE: Final = 50
EXPORTED_RUNS: Final = 5_000
MAX_CALLED: Final = 50
WINDOWS_NS: Final = {"1h": HOUR_NS, "24h": 24 * HOUR_NS, "7d": 7 * 24 * HOUR_NS}
_OUTCOME_NAMES: Final = frozenset(outcome.value for outcome in OUTCOMES)


class RunRoutes:
    """See the module."""

    def __init__(self, sources: Sources) -> None:
        self._sources, self._store = sources, sources.traces

    def routes(self) -> list[web.RouteDef]:
        """Everything under ``/console/runs`` and ``/console/requests``."""
        return [
            web.get("/console/runs", self._runs),
            web.get("/console/runs/{run_id}", self._run),
            web.get("/console/runs/{run_id}/diff", self._diff),
            web.get("/console/runs/{run_id}/records.jsonl", self._records),
            web.get("/console/requests/{request_id}", self._request),
        ]

    async def _runs(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        query, now_ns = _runs_query(request), self._sources.clock()
        window_ns = WINDOWS_NS.get(query.window)
        since_ns = None if window_ns is None else now_ns - window_ns
        where = _filter(query, visitor, since_ns)
        if (form := form_of(request)) is not None:
            found = await asyncio.to_thread(self._store.runs, EXPORTED_RUNS, where)
            return download([summary_row(each) for each in found], form, "runs")

        def show() -> str:
            found = self._store.runs(RUNS_PER_PAGE + 1, where)
            totals = self._store.totals(visitor.tenant, since_ns)
            choices = self._store.choices(visitor.tenant)
            more = len(found) > RUNS_PER_PAGE
            return runs_page(found[:RUNS_PER_PAGE], totals, query, now_ns, more=more, choices=choices, visitor=visitor)

        return page(await asyncio.to_thread(show))

    async def _run(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        number = whole_number(request.query.get("page")) or 1
        step = whole_number(request.query.get("step"))

        def show() -> tuple[str, int]:
            try:
                part = self.part(request.match_info["run_id"], _tenant(request, visitor), number, step)
            except AmbiguousRunError as error:
                return render("choice.html", visitor, run_id=error.run_id, tenants=error.tenants), 200
            if part is None:
                return render("missing.html", visitor, what="run of that name"), 404
            return run_page(part, visitor), 200

        return page(*await asyncio.to_thread(show))

    def part(self, run_id: str, tenant: str | None, number: int, step: int | None = None) -> RunPart | None:
        """One page of a run (or the one that a step is on), ``None`` where there is none of that name. Blocks."""
        outline = self._store.outline(run_id, tenant)
        if outline is None:
            return None
        if step is not None:
            place = next((at for at, each in enumerate(outline.steps) if each.step >= step), len(outline.steps) - 1)
            number = place // STEPS_PER_PAGE + 1
        number = min(max(number, 1), pages_of(len(outline.steps)))
        start = (number - 1) * STEPS_PER_PAGE
        summary = outline.summary
        shown = self._store.part(run_id, summary.tenant, start, STEPS_PER_PAGE)
        told = {span.tool_call_id: span for span in self._store.spans_of(shown) if span.tool_call_id is not None}
        calls = self._store.called_runs(summary.tenant, summary.first_ns, summary.last_ns)
        first = shown if start == 0 else self._store.part(run_id, summary.tenant, 0, 1)
        return RunPart(
            outline,
            shown,
            number,
            self._store.details(record.request_id for record in shown),
            told,
            self._called(summary, called_tree(run_id, calls)[:MAX_CALLED]),
            _caller(first),
        )

    def _called(self, summary: RunSummary, tree: Sequence[tuple[RunCall, int]]) -> list[CalledRun]:
        found = [(self._store.summary(call.run_id, summary.tenant), call, depth) for call, depth in tree]
        return [CalledRun(each, call, depth) for each, call, depth in found if each is not None]

    async def _diff(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        numbers = [whole_number(request.query.get(name)) for name in ("a", "b")]

        def show() -> tuple[str, int]:
            try:
                records = self._steps(request, visitor, numbers)
            except AmbiguousRunError as error:
                return render("choice.html", visitor, run_id=error.run_id, tenants=error.tenants), 200
            if records is None:
                return render("missing.html", visitor, what="such pair of steps"), 404
            details = self._store.details(record.request_id for record in records)
            return diff_page(*records, details, visitor), 200

        return page(*await asyncio.to_thread(show))

    def _steps(
        self, request: web.Request, visitor: Visitor, numbers: list[int | None]
    ) -> tuple[RequestRecord, RequestRecord] | None:
        outline = self._store.outline(request.match_info["run_id"], _tenant(request, visitor))
        if outline is None:
            return None
        ids = {step.step: step.request_id for step in outline.steps}
        found = [self._store.record(ids[number]) for number in numbers if number in ids]
        one, other = found if len(found) == 2 else (None, None)
        return None if one is None or other is None else (one, other)

    async def _records(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        try:
            records = await asyncio.to_thread(self._store.run, request.match_info["run_id"], _tenant(request, visitor))
        except AmbiguousRunError as error:
            return page(render("choice.html", visitor, run_id=error.run_id, tenants=error.tenants))
        if not records:
            return missing(visitor, "run of that name")
        body = b"".join(encode_record(record) + b"\n" for record in records)
        headers = HEADERS | {"Content-Disposition": 'attachment; filename="run.jsonl"'}
        return web.Response(body=body, content_type="application/x-ndjson", charset="utf-8", headers=headers)

    async def _request(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)

        def show() -> tuple[str, int]:
            record = self._store.record(request.match_info["request_id"])
            if record is None or visitor.tenant not in (None, record.identity.tenant):
                return render("missing.html", visitor, what="request of that id"), 404
            detail = self._store.details([record.request_id]).get(record.request_id)
            return request_page(record, detail, visitor), 200

        return page(*await asyncio.to_thread(show))


def _caller(first: Sequence[RequestRecord]) -> RunCall | None:
    link = first[0].link if first else None
    if link is None or link.parent_run_id is None:
        return None
    return RunCall(link.run_id, link.parent_run_id, link.parent_request_id, link.parent_call_id)


def _tenant(request: web.Request, visitor: Visitor) -> str | None:
    return request.query.get("tenant") if visitor.tenant is None else visitor.tenant


def _runs_query(request: web.Request) -> RunsQuery:
    said = {name: request.query.get(name, "").strip()[:200] for name in RunsQuery.NAMES}
    last_ns, tenant, run_id = (request.query.get(name) for name in ("last", "last_tenant", "last_run"))
    number = whole_number(last_ns)
    after = None if number is None or tenant is None or run_id is None else RunKey(number, tenant, run_id)
    return RunsQuery(**said, after=after)


def _filter(query: RunsQuery, visitor: Visitor, since_ns: int | None) -> RunFilter:
    return RunFilter(
        tenant=visitor.tenant,
        text=query.q or None,
        model=query.model or None,
        agent=query.agent or None,
        team=query.team or None,
        since_ns=since_ns,
        failed_only=query.status == "failed",
        unfailed_only=query.status == "whole",
        outcome=query.status if query.status in _OUTCOME_NAMES - {"ok"} else None,
        hit_below_percent=percentage(query.hit_below) if query.hit_below else None,
        cost_above_nano=nano_units(query.cost_above) if query.cost_above else None,
        after=query.after,
    )
