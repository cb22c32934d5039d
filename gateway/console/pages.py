"""Pages as pure functions over records: values in, HTML text out, everything escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from gateway.console.diffs import diff_view
from gateway.console.formats import count, share
from gateway.console.frame import query_href, render, run_href
from gateway.console.run_views import RunPart, run_view
from gateway.console.scale import token_bar, token_counts
from gateway.console.step_views import OUTCOMES, step_view
from gateway.console.views import legend, money_views, run_row
from gateway.console.visitor import EVERYBODY, Visitor
from tracing.detail import StepDetail
from tracing.record import Outcome, RequestRecord
from tracing.store import RunKey, RunSummary, StoreTotals
from tracing.store_series import Choices

STATUSES = (
    ("", "Any outcome"),
    ("whole", "All answered"),
    ("failed", "With failures"),
    *((outcome.value, OUTCOMES[outcome].capitalize()) for outcome in Outcome if outcome is not Outcome.OK),
)


@dataclass(frozen=True, slots=True)
class RunsQuery:
    """What the runs list was asked for, as its form and its links repeat it; ``after``: the last run of a page."""

    NAMES: ClassVar = ("q", "window", "model", "agent", "team", "status", "hit_below", "cost_above")

    q: str = ""
    window: str = ""
    model: str = ""
    agent: str = ""
    team: str = ""
    status: str = ""
    hit_below: str = ""
    cost_above: str = ""
    after: RunKey | None = None

    @property
    def said(self) -> dict[str, str]:
        """What was asked for by name, beside the place in the list."""
        return {name: value for name in self.NAMES if (value := getattr(self, name))}

    @property
    def finer(self) -> bool:
        """Whether anything beside the time is asked for."""
        return bool(self.said.keys() - {"window"})


def runs_page(
    summaries: Sequence[RunSummary],
    totals: StoreTotals,
    query: RunsQuery,
    now_ns: int,
    *,
    more: bool,
    choices: Choices | None = None,
    visitor: Visitor = EVERYBODY,
) -> str:
    """The list of runs, with the totals of everything that is stored for the query's window."""
    counts = (*totals.hit_tokens, totals.prompt_tokens - sum(totals.hit_tokens), 0, totals.output_tokens)
    following = None
    if more and summaries:
        last = summaries[-1]
        following = query_href(
            "/console/runs", **query.said, last=last.last_ns, last_tenant=last.tenant, last_run=last.run_id
        )
    return render(
        "runs.html",
        visitor,
        rows=[run_row(summary, now_ns) for summary in summaries],
        query=query,
        statuses=STATUSES,
        choices=choices or Choices((), (), ()),
        following=following,
        requests=count(totals.requests),
        runs=count(totals.runs),
        prompt=count(totals.prompt_tokens),
        hits=count(sum(totals.hit_tokens)),
        hit_share=share(sum(totals.hit_tokens), totals.prompt_tokens),
        money=money_views(totals.money),
        legend=legend(counts),
        bar_total=token_bar(counts, sum(counts)),
    )


def run_page(part: RunPart, visitor: Visitor = EVERYBODY) -> str:
    """One run: exact totals, the whole of it in a picture, and a page of its steps in order."""
    run = run_view(part)
    return render("run.html", visitor, **run_values(part), run=run)


def run_values(part: RunPart) -> dict[str, object]:
    """The addresses of a run's page."""
    summary = part.outline.summary
    address, _, query = run_href(summary.run_id, summary.tenant).partition("?")
    tenant = f"&{query}" if query else ""
    return {
        "export_href": f"{address}/records.jsonl" + (f"?{query}" if query else ""),
        "page_href": lambda number: f"{address}?page={number}{tenant}",
        "diff_href": lambda one, other: f"{address}/diff?a={one}&b={other}{tenant}",
        "breaks_href": query_href("/console/breaks", run=summary.run_id, tenant=summary.tenant),
        "whatif_href": query_href("/console/what-if", run=summary.run_id, tenant=summary.tenant),
        "live_href": query_href(
            "/console/live", view="run", run=summary.run_id, tenant=summary.tenant, after=part.outline.steps[-1].step
        ),
    }


def diff_page(
    one: RequestRecord, other: RequestRecord, details: Mapping[str, StepDetail], visitor: Visitor = EVERYBODY
) -> str:
    """Two steps of a run side by side."""
    run_id = one.link.run_id if one.link else one.request_id
    return render("diff.html", visitor, diff=diff_view(one, other, details), run_id=run_id, tenant=one.identity.tenant)


def request_page(record: RequestRecord, detail: StepDetail | None = None, visitor: Visitor = EVERYBODY) -> str:
    """One request with everything that its record says."""
    raw = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    return render(
        "request.html",
        visitor,
        record=record,
        step=step_view(record, detail=detail),
        reproduction=None if detail is None else detail.reproduction,
        legend=legend(token_counts(record.usage)),
        raw=raw,
    )
