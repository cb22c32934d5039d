"""What a page shows, as plain values: records in, text and positions out. Templates only place them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.console.formats import NOTHING, Amount, ago, count, duration, iso_moment, moment, money, share
from gateway.console.scale import TOKEN_CLASSES, Segment, Tick, TimeScale, token_bar, token_counts
from tracing.gaps import Gap, GapKind, gaps
from tracing.record import Outcome, RequestRecord, UsageSource
from tracing.store import Money, RunSummary

STEPS_PER_PAGE: Final = 200
_EVIDENCE: Final = {
    "header": "the client named the run",
    "session": "the client named its session",
    "previous_response_id": "it continues a response by its id",
    "tool_call_id": "it brings the result of a tool call that we answered with",
    "message_chain": "its messages continue an answer of ours",
    "new": "no earlier request is known to belong to it",
}
_OUTCOMES: Final = {
    Outcome.OK: "answered",
    Outcome.REJECTED: "rejected",
    Outcome.UPSTREAM_REFUSED: "refused by the engine",
    Outcome.UPSTREAM_FAILED: "engine failed",
    Outcome.TRUNCATED: "cut off",
    Outcome.ABORTED: "client left",
    Outcome.DIED: "gateway died",
}


@dataclass(frozen=True, slots=True)
class MoneyView:
    """A sum in one currency."""

    cost: Amount
    saved: Amount
    unpriced: int


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One token class with its total."""

    kind: str
    name: str
    tokens: str
    share: str
    meaning: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the runs list."""

    tenant: str
    run_id: str
    agent: str | None
    model: str
    when: str
    when_iso: str
    when_utc: str
    steps: str
    failed: int
    prompt: str
    hits: str
    hit_share: str
    bar: tuple[Segment, ...]
    ttft: str
    money: tuple[MoneyView, ...]


@dataclass(frozen=True, slots=True)
class ToolView:
    """A gap between two steps: the tools that ran in it, or a wait."""

    label: str
    kind: str
    bounded: str
    segments: tuple[Segment, ...]
    label_x: str  # where the time stands beside its bar
    label_anchor: str


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage of a request's time."""

    name: str
    duration: str
    segment: Segment


@dataclass(frozen=True, slots=True)
class LineView:
    """One line of a charge, or of a usage that has no price."""

    kind: str
    name: str
    tokens: str
    amount: Amount | None


@dataclass(frozen=True, slots=True)
class CandidateView:
    """An instance as the router saw it."""

    instance: str
    chosen: bool
    healthy: bool
    hits: str
    bar: tuple[Segment, ...]
    queued: str
    expected: str


@dataclass(frozen=True, slots=True)
class AttemptView:
    """A try at an instance."""

    instance: str
    result: str
    failed: bool
    duration: str


@dataclass(frozen=True, slots=True)
class StepView:
    """One request, alone or as a step of its run."""

    request_id: str
    step: int
    name: str
    outcome: str
    failed: bool
    error: str | None
    instance: str
    model: str
    when_utc: str
    when_iso: str
    prompt: str
    hits: str
    hit_share: str
    output: str
    counted: bool
    bar: tuple[Segment, ...]
    bar_label: str
    time: tuple[Segment, ...]
    stages: tuple[StageView, ...]
    ttft: str
    total: str
    cost: Amount | None
    saved: Amount | None
    unpriced_reason: str | None
    lines: tuple[LineView, ...]
    price_version: str
    policy: str | None
    prediction: str
    exact: bool
    candidates: tuple[CandidateView, ...]
    attempts: tuple[AttemptView, ...]
    tools: tuple[str, ...]
    evidence: str
    confidence: str
    previous_request_id: str | None
    problems: tuple[str, ...]
    gaps_after: tuple[ToolView, ...] = ()


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
    ticks: tuple[Tick, ...]
    cuts: tuple[Segment, ...]
    steps: tuple[StepView, ...]
    page: int
    pages: int


def money_views(sums: Sequence[Money]) -> tuple[MoneyView, ...]:
    """Sums as text, one a currency."""
    return tuple(
        MoneyView(money(each.cost_nano, each.currency), money(each.saved_nano, each.currency), each.unpriced)
        for each in sums
    )


def sum_money(records: Sequence[RequestRecord]) -> tuple[Money, ...]:
    """Exact sums over records, by currency; equal to the trace store's."""
    sums: dict[str, list[int]] = {}
    for record in records:
        each = sums.setdefault(record.charge.currency, [0, 0, 0])
        each[0] += record.charge.amount_nano or 0
        each[1] += record.charge.saved_nano or 0
        each[2] += record.charge.amount_nano is None
    return tuple(Money(currency, *values) for currency, values in sorted(sums.items()))


def run_row(summary: RunSummary, now_ns: int) -> RunRow:
    """One line of the runs list."""
    hits = sum(summary.hit_tokens)
    return RunRow(
        tenant=summary.tenant,
        run_id=summary.run_id,
        agent=summary.agent,
        model=summary.model,
        when=ago(summary.last_ns, now_ns),
        when_iso=iso_moment(summary.last_ns),
        when_utc=moment(summary.last_ns) + " UTC",
        steps=count(summary.steps),
        failed=summary.failed,
        prompt=count(summary.prompt_tokens),
        hits=count(hits),
        hit_share=share(hits, summary.prompt_tokens),
        bar=token_bar((*summary.hit_tokens, summary.prompt_tokens - hits), summary.prompt_tokens),
        ttft=duration(summary.ttft_p50_ns),
        money=money_views(summary.money),
    )


def run_view(records: Sequence[RequestRecord], page: int = 1) -> RunView:
    """The page of a run that has at least one record."""
    first, last = records[0], records[-1]
    counts = tuple(map(sum, zip(*(token_counts(record.usage) for record in records), strict=True)))
    pages = -(-len(records) // STEPS_PER_PAGE)
    page = min(max(page, 1), pages)
    shown = records[(page - 1) * STEPS_PER_PAGE : page * STEPS_PER_PAGE]
    scale_tokens = max(record.usage.total_tokens for record in shown) or 1
    between = {gap.after_request_id: gap for gap in gaps(shown)}
    clock = TimeScale(_busy(record) for record in shown)
    ttfts = sorted(record.stamps.ttft_ns for record in records if record.stamps.ttft_ns is not None)
    prompt = sum(record.usage.prompt_tokens for record in records)
    hits = sum(record.usage.hit_tokens for record in records)
    return RunView(
        tenant=first.identity.tenant,
        run_id=first.link.run_id if first.link else first.request_id,
        agent=next((name for record in reversed(records) if (name := record.labels.get("agent"))), None),
        models=", ".join(dict.fromkeys(record.model for record in records if record.model)) or NOTHING,
        when_utc=moment(first.stamps.arrived_ns) + " UTC",
        when_iso=iso_moment(first.stamps.arrived_ns),
        elapsed=duration(max(record.stamps.closed_ns for record in records) - first.stamps.arrived_ns)
        if last.stamps.closed_ns
        else NOTHING,
        steps_total=count(len(records)),
        failed=sum(record.outcome is not Outcome.OK for record in records),
        prompt=count(prompt),
        hits=count(hits),
        hit_share=share(hits, prompt),
        output=count(counts[-1]),
        ttft_p50=duration(ttfts[(len(ttfts) - 1) // 2] if ttfts else None),
        money=money_views(sum_money(records)),
        legend=legend(counts),
        bar=token_bar(counts, sum(counts)),
        ticks=clock.ticks(),
        cuts=tuple(
            clock.segment("cut", start, end, f"{duration(end - start)} in which no request ran, cut short")
            for start, end in clock.cuts
        ),
        steps=tuple(
            step_view(record, scale_tokens, clock, between.get(record.request_id)) for record in shown
        ),
        page=page,
        pages=pages,
    )  # fmt: skip


def legend(counts: Sequence[int]) -> tuple[LegendEntry, ...]:
    """The token classes that occur, with their totals."""
    total = sum(counts)
    return tuple(
        LegendEntry(kind, name, count(tokens), share(tokens, total), meaning)
        for (kind, name, meaning), tokens in zip(TOKEN_CLASSES, counts, strict=True)
        if tokens
    )


def step_view(
    record: RequestRecord,
    scale_tokens: int | None = None,
    clock: TimeScale | None = None,
    gap: Gap | None = None,
) -> StepView:
    """One request; on its own it is the scale of its bars."""
    usage, charge, decision = record.usage, record.charge, record.decision
    clock = clock or TimeScale([_busy(record)])
    counts = token_counts(usage)
    stages = _stages(record, clock)
    failed = record.outcome is not Outcome.OK
    return StepView(
        request_id=record.request_id,
        step=record.link.step if record.link else 1,
        name=_name(record),
        outcome=_OUTCOMES[record.outcome],
        failed=failed,
        error=record.error or (str(record.status) if failed else None),
        instance=record.instance or NOTHING,
        model=record.model or NOTHING,
        when_utc=moment(record.stamps.arrived_ns) + " UTC",
        when_iso=iso_moment(record.stamps.arrived_ns),
        prompt=count(usage.prompt_tokens),
        hits=count(usage.hit_tokens),
        hit_share=share(usage.hit_tokens, usage.prompt_tokens),
        output=count(usage.output_tokens),
        counted=usage.source is not UsageSource.MISSING,
        bar=token_bar(counts, scale_tokens or usage.total_tokens or 1),
        bar_label=_bar_label(counts),
        time=tuple(stage.segment for stage in stages),
        stages=stages,
        ttft=duration(record.stamps.ttft_ns),
        total=duration(record.stamps.closed_ns - record.stamps.arrived_ns) if record.stamps.closed_ns else NOTHING,
        cost=None if charge.amount_nano is None else money(charge.amount_nano, charge.currency),
        saved=None if charge.saved_nano is None else money(charge.saved_nano, charge.currency),
        unpriced_reason=charge.unpriced_reason,
        lines=_lines(record),
        price_version=charge.price_version,
        policy=decision.policy if decision else None,
        prediction=count(decision.predicted_hit_tokens) if decision else NOTHING,
        exact=decision.exact if decision else False,
        candidates=_candidates(record),
        attempts=tuple(
            AttemptView(
                attempt.instance,
                attempt.error or str(attempt.status),
                attempt.error is not None or (attempt.status or 500) >= 400,
                duration(attempt.ended_ns - attempt.started_ns),
            )
            for attempt in record.attempts
        ),
        tools=tuple(call.name for call in record.tool_calls),
        evidence=_EVIDENCE.get(record.link.method, record.link.method) if record.link else NOTHING,
        confidence=f"{record.link.confidence:g}" if record.link else NOTHING,
        previous_request_id=record.link.previous_request_id if record.link else None,
        problems=record.usage_problems,
        gaps_after=(_gap_view(gap, clock),) if gap is not None and gap.duration_ns else (),
    )


def _busy(record: RequestRecord) -> tuple[int, int]:
    stamps = record.stamps
    return stamps.arrived_ns, max(stamps.closed_ns, stamps.arrived_ns)


def _name(record: RequestRecord) -> str:
    if name := record.labels.get("step_name"):
        return name
    if record.outcome is not Outcome.OK:
        return _OUTCOMES[record.outcome]
    names = [call.name for call in record.tool_calls]
    if not names:
        return "answers"
    return f"calls {names[0]}" if len(names) == 1 else f"calls {names[0]} +{len(names) - 1}"


def _bar_label(counts: Sequence[int]) -> str:
    parts = [f"{count(tokens)} {name}" for (_, name, _), tokens in zip(TOKEN_CLASSES, counts, strict=True) if tokens]
    return "Tokens: " + (", ".join(parts) or "none")


def _stages(record: RequestRecord, clock: TimeScale) -> tuple[StageView, ...]:
    """Arrival, routing, prefill and generation, as far as the request came."""
    stamps = record.stamps
    ended = max(stamps.closed_ns, stamps.arrived_ns)
    answered = stamps.first_token_ns is not None
    marks = (
        ("route", "Admit and route", stamps.routed_ns),
        ("send", "Connect and send", stamps.sent_ns),
        ("prefill", "Fetch and prefill, to the first token", stamps.first_token_ns),
        ("decode", "Generate", stamps.last_token_ns if answered else None),
        ("close", "Close", ended) if answered else ("prefill", "Until the end, no token came", ended),
    )
    stages: list[StageView] = []
    start = stamps.arrived_ns
    for kind, name, mark in marks:
        if mark is None or mark < start:
            continue
        title = f"{name}: {duration(mark - start)}"
        stages.append(StageView(name, duration(mark - start), clock.segment(kind, start, mark, title)))
        start = mark
    return tuple(stages)


def _lines(record: RequestRecord) -> tuple[LineView, ...]:
    names = {f"hit_{kind}": (kind, name) for kind, name, _ in TOKEN_CLASSES[:5]}
    names |= {kind: (kind, name) for kind, name, _ in TOKEN_CLASSES[5:]}
    charge, order = record.charge, list(names)
    if charge.lines:
        lines = sorted(
            charge.lines,
            key=lambda line: order.index(line.token_class) if line.token_class in names else len(order),
        )
        return tuple(
            LineView(
                *names.get(line.token_class, ("other", line.token_class.replace("_", " ").capitalize())),
                count(line.quantity),
                money(line.amount_nano, charge.currency),
            )
            for line in lines
        )
    counts = zip(TOKEN_CLASSES, token_counts(record.usage), strict=True)
    return tuple(LineView(kind, name, count(tokens), None) for (kind, name, _), tokens in counts if tokens)


def _candidates(record: RequestRecord) -> tuple[CandidateView, ...]:
    if record.decision is None:
        return ()
    scale = max([record.usage.prompt_tokens, 1, *(sum(each.hit_tokens) for each in record.decision.candidates)])
    return tuple(
        CandidateView(
            instance=each.instance,
            chosen=each.instance == record.decision.instance,
            healthy=each.healthy,
            hits=count(sum(each.hit_tokens)),
            bar=token_bar(each.hit_tokens, scale),
            queued=count(each.queued_tokens),
            expected=duration(each.expected_ttft_ns),
        )
        for each in record.decision.candidates
    )


def _gap_view(gap: Gap, clock: TimeScale) -> ToolView:
    took = duration(gap.duration_ns)
    start, end = clock.at(gap.started_ns), clock.at(gap.ended_ns)
    anchor = ("end", start) if end > 80.0 else ("start", end)
    if gap.kind is GapKind.WAIT:
        names, bounded = "wait", took
        title = f"{took} between this answer and the next request: no tool was asked for"
    else:
        names, bounded = ", ".join(call.name for call in gap.calls), f"≤ {took}"
        shared = f", shared by {len(gap.calls)} parallel calls" if len(gap.calls) > 1 else ""
        title = f"{names}: at most {took}{shared} (inferred from the gap between answer and result)"
    segment = clock.segment(gap.kind.value, gap.started_ns, gap.ended_ns, title, seen=True)
    return ToolView(names, gap.kind.value, bounded, (segment,), f"{anchor[1]:.2f}%", anchor[0])
