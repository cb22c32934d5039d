"""Pages as pure functions over records: values in, HTML text out, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from gateway.console.assets import asset_href
from gateway.console.costs import DIMENSIONS, WINDOWS, CostQuery, CostTotal
from gateway.console.formats import count, share
from gateway.console.instances import InstanceRow
from gateway.console.scale import token_bar, token_counts
from gateway.console.views import legend, money_views, run_row, run_view, step_view
from tracing.record import RequestRecord
from tracing.store import RunSummary, StoreTotals


@dataclass(frozen=True, slots=True)
class RunsQuery:
    """What the runs list was asked for, as its form and its links repeat it."""

    text: str = ""
    window: str = ""
    failed: bool = False
    before_ns: int | None = None
    tenant: str | None = None


def runs_page(
    summaries: Sequence[RunSummary], totals: StoreTotals, query: RunsQuery, now_ns: int, *, more: bool
) -> str:
    """The list of runs, with the totals of everything that is stored for the query's window."""
    counts = (*totals.hit_tokens, totals.prompt_tokens - sum(totals.hit_tokens), 0, totals.output_tokens)
    following = None
    if more and summaries:
        following = "?" + urlencode(
            {
                name: value
                for name, value in (
                    ("q", query.text),
                    ("window", query.window),
                    ("failed", "1" if query.failed else ""),
                    ("before", summaries[-1].last_ns),
                )
                if value
            }
        )
    return _environment().get_template("runs.html").render(
        rows=[run_row(summary, now_ns) for summary in summaries],
        query=query,
        following=following,
        requests=count(totals.requests),
        runs=count(totals.runs),
        prompt=count(totals.prompt_tokens),
        hits=count(sum(totals.hit_tokens)),
        hit_share=share(sum(totals.hit_tokens), totals.prompt_tokens),
        money=money_views(totals.money),
        legend=legend(counts),
        bar_total=token_bar(counts, sum(counts)),
    )  # fmt: skip


def run_page(records: Sequence[RequestRecord], page: int = 1) -> str:
    """One run: exact totals, and its steps in order."""
    run = run_view(records, page)
    address, _, query = run_href(run.run_id, run.tenant).partition("?")
    tenant = f"&{query}" if query else ""
    return _environment().get_template("run.html").render(
        run=run,
        export_href=f"{address}/records.jsonl" + (f"?{query}" if query else ""),
        page_href=lambda number: f"{address}?page={number}{tenant}",
    )  # fmt: skip


def request_page(record: RequestRecord) -> str:
    """One request with everything that its record says."""
    raw = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    return _environment().get_template("request.html").render(
        record=record, step=step_view(record), legend=legend(token_counts(record.usage)), raw=raw
    )  # fmt: skip


def instances_page(rows: Sequence[InstanceRow] | None) -> str:
    """The engines; ``None`` for a visitor who may not see them."""
    return _environment().get_template("instances.html").render(rows=rows)


def cost_page(totals: Sequence[CostTotal], query: CostQuery) -> str:
    """What was spent and saved: the ledger's sums."""
    return _environment().get_template("cost.html").render(
        totals=totals,
        query=query,
        dimensions=DIMENSIONS,
        windows=WINDOWS,
        downloads="/console/cost?" + urlencode({"by": query.by, "window": query.window}),
    )  # fmt: skip


def missing_page(what: str) -> str:
    """What is shown where nothing is found."""
    return _environment().get_template("missing.html").render(what=what)


def choice_page(run_id: str, tenants: Sequence[str]) -> str:
    """Which tenant's run of that name is meant."""
    return _environment().get_template("choice.html").render(run_id=run_id, tenants=tenants)


def run_href(run_id: str, tenant: str, *, always: bool = False) -> str:
    """The address of a run's page; the tenant is named unless it is the default one, or ``always``."""
    address = f"/console/runs/{quote(run_id, safe='')}"
    return address if tenant == "default" and not always else f"{address}?{urlencode({'tenant': tenant})}"


def request_href(request_id: str) -> str:
    """The address of a request's page."""
    return f"/console/requests/{quote(request_id, safe='')}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("gateway.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = asset_href
    environment.globals["run_href"] = run_href
    environment.globals["request_href"] = request_href
    return environment
