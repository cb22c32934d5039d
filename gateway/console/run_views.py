"""A run as plain values: exact totals over all its steps, the whole of it in one picture, and one page of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.console.formats import NOTHING, count, duration, iso_moment, moment, share
from gateway.console.provenance import writers_of
from gateway.console.scale import TOKEN_CLASSES, Segment, Tick, TimeScale, percent, token_bar
from gateway.console.step_views import StepView, busy, step_view
from gateway.console.views import LegendEntry, MoneyView, RunRow, legend, money_views, run_row, sum_money
from tracing.detail import StepDetail
from tracing.gaps import gaps
from tracing.received import ReceivedSpan
from tracing.record import RequestRecord
from tracing.store import RunSummary
from tracing.store_outline import RunCall, RunOutline, StepOutline, step_outline, summary_of

STEPS_PER_PAGE: Final = 50
MAX_COLUMNS: Final = 160
"""Of the picture of a whole run: more steps share a column."""
LEAST_SLOTS: Final = 24
"""Columns that a picture has room for, however short the run."""
_PARTS: Final = (*(kind for kind, _, _ in TOKEN_CLASSES[:6]), "output")


@dataclass(frozen=True, slots=True)
class Column:
    """Some steps of the run in its picture: a stack of their mean tokens, from the bottom up, in percent."""

    step: int
    page: int
    x: str
    width: str
    title: str
    parts: tuple[tuple[str, str, str], ...]  # kind, y, height
    ttft_y: str | None
    ttft_height: str
    is_shown: bool
    has_failed: bool


@dataclass(frozen=True, slots=True)
class CalledRun:
    """A run that this one called for, or one of those did. ``depth``: from 1."""

    summary: RunSummary
    call: RunCall
    depth: int


@dataclass(frozen=True, slots=True)
class CalledRow:
    """The same as the page shows it; its bar lies on the whole run's time."""

    depth: int
    row: RunRow
    x: str
    width: str
    title: str
    from_step: int | None


@dataclass(frozen=True, slots=True)
class RunPart:
    """What a run's page is made of: the run in outline, and the records of one page of steps.

    ``told``: what the agent itself tells of tool calls; ``called``: the runs that it called for, as a tree in order;
    ``caller``: what called for this one.
    """

    outline: RunOutline
    shown: Sequence[RequestRecord]
    page: int = 1
    details: Mapping[str, StepDetail] = field(default_factory=dict)
    told: Mapping[str, ReceivedSpan] = field(default_factory=dict)
    called: Sequence[CalledRun] = ()
    caller: RunCall | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run's page: exact totals over all its records, and one page of its steps."""

    tenant: str
    run_id: str
    agent: str | None
    models: str
    when_utc: str
    when_iso: str
    elapsed: str
    steps_total: str
    failed: int
    prompt: str
    hits: str
    hit_share: str
    output: str
    ttft_p50: str
    money: tuple[MoneyView, ...]
    legend: tuple[LegendEntry, ...]
    bar: tuple[Segment, ...]
    columns: tuple[Column, ...]
    ticks: tuple[Tick, ...]
    cuts: tuple[Segment, ...]
    steps: tuple[StepView, ...]
    page: int
    pages: int
    called: tuple[CalledRow, ...]
    caller_run: str | None


def pages_of(steps: int) -> int:
    """How many pages so many steps take."""
    return max(-(-steps // STEPS_PER_PAGE), 1)


def page_of(records: Sequence[RequestRecord], page: int = 1) -> RunPart:
    """One page of a run whose records are all at hand."""
    page = min(max(page, 1), pages_of(len(records)))
    steps = [step_outline(record) for record in records]
    first = records[0]
    agent = max((name for record in records if (name := record.labels.get("agent"))), default=None)
    run_id = first.link.run_id if first.link else first.request_id
    summary = summary_of(first.identity.tenant, run_id, agent, steps, sum_money(records))
    shown = records[(page - 1) * STEPS_PER_PAGE : page * STEPS_PER_PAGE]
    return RunPart(RunOutline(summary, steps), shown, page)


def run_view(part: RunPart) -> RunView:
    """The page of a run that has at least one record."""
    summary, steps, shown = part.outline.summary, part.outline.steps, part.shown
    hits = sum(summary.hit_tokens)
    counts = (*summary.hit_tokens, summary.prompt_tokens - hits, 0, summary.output_tokens)
    scale_tokens = max(record.usage.total_tokens for record in shown) or 1
    between = {gap.after_request_id: gap for gap in gaps(shown)}
    clock = TimeScale(busy(record) for record in shown)
    writers = writers_of(steps, (record.request_id for record in shown))
    ended_ns = max(summary.last_ns, *(record.stamps.closed_ns for record in shown))
    return RunView(
        tenant=summary.tenant,
        run_id=summary.run_id,
        agent=summary.agent,
        models=", ".join(dict.fromkeys(step.model for step in steps if step.model)) or NOTHING,
        when_utc=moment(summary.first_ns) + " UTC",
        when_iso=iso_moment(summary.first_ns),
        elapsed=duration(ended_ns - summary.first_ns),
        steps_total=count(summary.steps),
        failed=summary.failed,
        prompt=count(summary.prompt_tokens),
        hits=count(hits),
        hit_share=share(hits, summary.prompt_tokens),
        output=count(summary.output_tokens),
        ttft_p50=duration(summary.ttft_p50_ns),
        money=money_views(summary.money),
        legend=legend(counts),
        bar=token_bar(counts, sum(counts)),
        columns=columns(steps, part.page),
        ticks=clock.ticks(),
        cuts=tuple(
            clock.segment("cut", start, end, f"{duration(end - start)} in which no request ran, cut short")
            for start, end in clock.cuts
        ),
        steps=tuple(
            step_view(
                record,
                scale_tokens,
                clock,
                between.get(record.request_id),
                writers=writers.get(record.request_id, ()),
                detail=part.details.get(record.request_id),
                told=part.told,
            )
            for record in shown
        ),
        page=part.page,
        pages=pages_of(summary.steps),
        called=tuple(_called_row(each, part, ended_ns) for each in part.called),
        caller_run=part.caller.parent_run_id if part.caller is not None else None,
    )


def called_tree(run_id: str, calls: Sequence[RunCall]) -> list[tuple[RunCall, int]]:
    """The runs below one, each behind its parent, with their depths. Each run stands once, whatever clients say."""
    below: dict[str, list[RunCall]] = {}
    for call in calls:
        below.setdefault(call.parent_run_id, []).append(call)
    found: list[tuple[RunCall, int]] = []
    seen, waiting = {run_id}, [(call, 1) for call in reversed(below.get(run_id, []))]
    while waiting:
        call, depth = waiting.pop()
        if call.run_id not in seen:
            seen.add(call.run_id)
            found.append((call, depth))
            waiting += [(each, depth + 1) for each in reversed(below.get(call.run_id, []))]
    return found


def _called_row(called: CalledRun, part: RunPart, ended_ns: int) -> CalledRow:
    first_ns, summary = part.outline.summary.first_ns, called.summary
    whole_ns = max(ended_ns - first_ns, 1)
    start_ns = min(max(summary.first_ns - first_ns, 0), whole_ns)
    length_ns = min(max(summary.last_ns - summary.first_ns, whole_ns // 200), whole_ns - start_ns)
    steps = {step.request_id: step.step for step in part.outline.steps}
    return CalledRow(
        depth=called.depth,
        row=run_row(summary, summary.last_ns),
        x=percent(start_ns, whole_ns),
        width=percent(length_ns, whole_ns),
        title=f"began {duration(start_ns)} into the run, its last step {duration(summary.last_ns - first_ns)}",
        from_step=steps.get(called.call.parent_request_id or ""),
    )


def columns(steps: Sequence[StepOutline], page: int) -> tuple[Column, ...]:
    """The whole run in one picture: tokens by where they came from, and times to the first token. O(steps)."""
    each = -(-len(steps) // MAX_COLUMNS)
    groups = [steps[start : start + each] for start in range(0, len(steps), each)]
    slots = max(len(groups), LEAST_SLOTS)
    tallest = max(sum(_mean_tokens(group)) for group in groups) or 1
    times = [[step.ttft_ns for step in group if step.ttft_ns is not None] for group in groups]
    slowest = max((max(some) for some in times if some), default=0) or 1
    found = []
    for number, (group, ttfts) in enumerate(zip(groups, times, strict=True)):
        height, at, parts = 0.0, 100.0, []
        for kind, tokens in zip(_PARTS, _mean_tokens(group), strict=True):
            if tokens:
                height = 100 * tokens / tallest
                at -= height
                parts.append((kind, f"{max(at, 0):.2f}%", f"{height:.2f}%"))
        first_page = number * each // STEPS_PER_PAGE + 1
        ttft = max(ttfts) / slowest if ttfts else None
        found.append(
            Column(
                step=group[0].step,
                page=first_page,
                x=f"{100 * number / slots:.3f}%",
                width=f"{86 / slots:.3f}%",
                title=_title(group),
                parts=tuple(parts),
                ttft_y=None if ttft is None else f"{100 - 100 * ttft:.1f}%",
                ttft_height="0%" if ttft is None else f"{100 * ttft:.1f}%",
                is_shown=first_page == page,
                has_failed=any(step.outcome != "ok" for step in group),
            )
        )
    return tuple(found)


def _mean_tokens(group: Sequence[StepOutline]) -> list[float]:
    hits = [sum(column) / len(group) for column in zip(*(step.hit_tokens for step in group), strict=True)]
    prompt = sum(step.prompt_tokens for step in group) / len(group)
    return [*hits, max(prompt - sum(hits), 0), sum(step.output_tokens for step in group) / len(group)]


def _title(group: Sequence[StepOutline]) -> str:
    prompt = sum(step.prompt_tokens for step in group)
    hits = sum(sum(step.hit_tokens) for step in group)
    ttfts = [step.ttft_ns for step in group if step.ttft_ns is not None]
    first, last = group[0].step, group[-1].step
    steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
    slowest = f", TTFT {duration(max(ttfts))}" + (" at most" if len(group) > 1 else "") if ttfts else ""
    return f"{steps}: {count(prompt)} prompt tokens, {share(hits, prompt)} warm{slowest}"
