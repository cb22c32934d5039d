"""The console over HTTP: aiohttp routes that read the trace store in a thread and answer with the pages.

Whoever mounts these routes decides who may see them. ``tenant_of`` says which tenant's data a request may see
(``None``: everybody's); it is asked on every request, so no address shows the run of another tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web

from billing.ledger_read import RowFilter
from billing.reports import Report, build_report, render_csv, render_json
from gateway.console.assets import assets
from gateway.console.costs import CostQuery, ReportOf, cost_report, cost_totals
from gateway.console.instances import InstanceRow
from gateway.console.pages import (
    RunsQuery,
    choice_page,
    cost_page,
    instances_page,
    missing_page,
    request_page,
    run_page,
    runs_page,
)
from tracing.errors import AmbiguousRunError
from tracing.record import RequestRecord
from tracing.store import RunFilter, TraceStore
from tracing.store_schema import encode_record

RUNS_PER_PAGE: Final = 50
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_WINDOWS_NS: Final = {"1h": 3600 * 10**9, "24h": 24 * 3600 * 10**9, "7d": 7 * 24 * 3600 * 10**9}

TenantOf = Callable[[web.Request], str | None]
Clock = Callable[[], int]
Instances = Callable[[], Sequence[InstanceRow]]
_COST_FORMS: Final = {"csv": (render_csv, "text/csv"), "json": (render_json, "application/json")}


def _no_report(by: Sequence[str], _where: RowFilter) -> Report:
    return build_report((), by)


def routes(
    trace_store: TraceStore,
    *,
    tenant_of: TenantOf | None = None,
    clock: Clock = time.time_ns,
    instances: Instances = tuple,
    report_of: ReportOf = _no_report,
) -> list[web.RouteDef]:
    """Everything under ``/console``, to be added to an application's router.

    ``instances``: those of this moment; ``report_of``: the ledger's report, called in a thread.
    """
    console = _Console(trace_store, tenant_of or (lambda _request: None), clock, instances, report_of)
    return [
        web.get("/console", console.runs),
        web.get("/console/", console.to_runs),
        web.get("/console/instances", console.instances),
        web.get("/console/cost", console.cost),
        web.get("/console/runs/{run_id}", console.run),
        web.get("/console/runs/{run_id}/records.jsonl", console.run_records),
        web.get("/console/requests/{request_id}", console.request),
        web.get("/console/static/{name}", console.asset),
        web.get("/console/{rest:.*}", console.missing),
    ]


class _Console:
    def __init__(
        self, store: TraceStore, tenant_of: TenantOf, clock: Clock, instances: Instances, report_of: ReportOf
    ) -> None:
        self._store, self._tenant_of, self._clock, self._instances = store, tenant_of, clock, instances
        self._report_of = report_of

    async def runs(self, request: web.Request) -> web.Response:
        now_ns = self._clock()
        query = RunsQuery(
            text=request.query.get("q", "").strip()[:200],
            window=request.query.get("window", ""),
            failed=request.query.get("failed") == "1",
            before_ns=_whole_number(request.query.get("before")),
            tenant=self._tenant_of(request),
        )
        window_ns = _WINDOWS_NS.get(query.window)
        since_ns = None if window_ns is None else now_ns - window_ns
        where = RunFilter(
            tenant=query.tenant,
            text=query.text or None,
            since_ns=since_ns,
            until_ns=query.before_ns,
            failed_only=query.failed,
        )

        def render() -> str:
            found = self._store.runs(RUNS_PER_PAGE + 1, where)
            totals = self._store.totals(query.tenant, since_ns)
            return runs_page(found[:RUNS_PER_PAGE], totals, query, now_ns, more=len(found) > RUNS_PER_PAGE)

        return _page(await asyncio.to_thread(render))

    async def to_runs(self, request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect("/console")

    async def instances(self, request: web.Request) -> web.Response:
        is_allowed = self._tenant_of(request) is None
        return _page(instances_page(self._instances() if is_allowed else None), 200 if is_allowed else 403)

    async def cost(self, request: web.Request) -> web.Response:
        query = CostQuery.of(request.query.get("by", ""), request.query.get("window", ""), self._tenant_of(request))
        now_ns, form = self._clock(), request.query.get("form")
        if form in _COST_FORMS:
            render, content_type = _COST_FORMS[form]
            report = await asyncio.to_thread(cost_report, self._report_of, query, now_ns)
            headers = HEADERS | {"Content-Disposition": f'attachment; filename="cost.{form}"'}
            return web.Response(text=render(report), content_type=content_type, charset="utf-8", headers=headers)
        totals = await asyncio.to_thread(cost_totals, self._report_of, query, now_ns)
        return _page(cost_page(totals, query))

    async def run(self, request: web.Request) -> web.Response:
        page = _whole_number(request.query.get("page")) or 1

        def render() -> tuple[str, int]:
            try:
                records = self._records(request)
            except AmbiguousRunError as error:
                return choice_page(error.run_id, error.tenants), 200
            return (run_page(records, page), 200) if records else (missing_page("run of that name"), 404)

        return _page(*await asyncio.to_thread(render))

    async def run_records(self, request: web.Request) -> web.Response:
        try:
            records = await asyncio.to_thread(self._records, request)
        except AmbiguousRunError as error:
            return _page(choice_page(error.run_id, error.tenants))
        if not records:
            return _page(missing_page("run of that name"), 404)
        body = b"".join(encode_record(record) + b"\n" for record in records)
        headers = HEADERS | {"Content-Disposition": 'attachment; filename="run.jsonl"'}
        return web.Response(body=body, content_type="application/x-ndjson", charset="utf-8", headers=headers)

    async def request(self, request: web.Request) -> web.Response:
        def render() -> tuple[str, int]:
            record = self._store.record(request.match_info["request_id"])
            tenant = self._tenant_of(request)
            if record is None or tenant not in (None, record.identity.tenant):
                return missing_page("request of that id"), 404
            return request_page(record), 200

        return _page(*await asyncio.to_thread(render))

    async def asset(self, request: web.Request) -> web.Response:
        asset = assets().get(request.match_info["name"])
        if asset is None:
            return _page(missing_page("such file"), 404)
        age = "max-age=31536000, immutable" if request.query.get("v") == asset.digest else "no-cache"
        return web.Response(
            body=asset.body,
            content_type=asset.content_type,
            charset="utf-8",
            headers=HEADERS | {"Cache-Control": age},
        )

    async def missing(self, request: web.Request) -> web.Response:
        return _page(missing_page("such page"), 404)

    def _records(self, request: web.Request) -> list[RequestRecord]:
        tenant = self._tenant_of(request)
        if tenant is None:
            tenant = request.query.get("tenant")
        return self._store.run(request.match_info["run_id"], tenant)


def _page(html: str, status: int = 200) -> web.Response:
    response = web.Response(text=html, status=status, content_type="text/html", charset="utf-8", headers=HEADERS)
    response.enable_compression()
    return response


def _whole_number(text: str | None) -> int | None:
    """A number below 2**63 as SQLite takes it, ``None`` for anything else."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19:
        return None
    return number if (number := int(text)) < 2**63 else None
