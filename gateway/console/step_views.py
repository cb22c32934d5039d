"""One request as plain values: its bar of tokens, its stages, its charge, its decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.console.first_token import first_token_parts
from gateway.console.formats import NOTHING, Amount, count, duration, iso_moment, moment, money, share
from gateway.console.provenance import Writers
from gateway.console.scale import TOKEN_CLASSES, Segment, TimeScale, percent, token_bar, token_counts
from tracing.detail import BESIDE_THE_PROMPT, Comparison, StepDetail
from tracing.gaps import Gap, GapKind
from tracing.received import ReceivedSpan
from tracing.record import Outcome, RequestRecord, ToolCall, UsageSource

_EVIDENCE: Final = {
    "header": "the client named the run",
    "session": "the client named its session",
    "previous_response_id": "it continues a response by its id",
    "tool_call_id": "it brings the result of a tool call that we answered with",
    "message_chain": "its messages continue an answer of ours",
    "new": "no earlier request is known to belong to it",
}
OUTCOMES: Final = {
    Outcome.OK: "answered",
    Outcome.REJECTED: "rejected",
    Outcome.UPSTREAM_REFUSED: "refused by the engine",
    Outcome.UPSTREAM_FAILED: "engine failed",
    Outcome.TRUNCATED: "cut off",
    Outcome.ABORTED: "client left",
    Outcome.DIED: "gateway died",
}
_COMPARED: Final = {
    Comparison.FIRST: "It continues no earlier request.",
    Comparison.UNSEEN: "What it continues is not at hand any more.",
    Comparison.APPENDED: "It says what the step before said, and goes on.",
    Comparison.SHORTENED: "It goes on from an earlier point of the step before.",
    Comparison.CHANGED: "Something that the step before said stands otherwise now.",
}
_BESIDE: Final = "It goes on; what stands otherwise now is nothing that most prompts show."


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
    """One stage of a request's time. ``is_estimate``: a share of a measured time, not itself measured."""

    name: str
    duration: str
    segment: Segment
    is_estimate: bool = False


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
class ChangeView:
    """What a step changed of what the step before said, as its diagnosis tells it."""

    summary: str
    kind: str | None = None
    is_harmless: bool = False  # mostly: prompts do not show it
    path: str = ""
    place: str = ""
    before: str | None = None
    after: str | None = None
    before_hash: str = ""
    after_hash: str = ""
    bar: tuple[Segment, ...] = ()
    differs: str = ""


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
    preferred: str | None
    prediction: str
    prediction_error: str
    exact: bool
    candidates: tuple[CandidateView, ...]
    routing_notes: tuple[str, ...]
    attempts: tuple[AttemptView, ...]
    tools: tuple[str, ...]
    evidence: str
    confidence: str
    previous_request_id: str | None
    problems: tuple[str, ...]
    change: ChangeView | None = None
    gaps_after: tuple[ToolView, ...] = ()


def step_view(
    record: RequestRecord,
    scale_tokens: int | None = None,
    clock: TimeScale | None = None,
    gap: Gap | None = None,
    *,
    writers: Sequence[Writers | None] = (),
    detail: StepDetail | None = None,
    told: Mapping[str, ReceivedSpan] | None = None,
) -> StepView:
    """One request; on its own it is the scale of its bars. ``writers``: who computed its hits, by tier; ``told``: what
    the agent itself tells of tool calls, by their ids."""
    usage, charge, decision = record.usage, record.charge, record.decision
    clock = clock or TimeScale([busy(record)])
    counts = token_counts(usage)
    stages = _stages(record, clock)
    failed = record.outcome is not Outcome.OK
    return StepView(
        request_id=record.request_id,
        step=record.link.step if record.link else 1,
        name=_name(record),
        outcome=OUTCOMES[record.outcome],
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
        bar=token_bar(counts, scale_tokens or usage.total_tokens or 1, _read_from(record, writers)),
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
        preferred=decision.preferred if decision else None,
        prediction=count(decision.predicted_hit_tokens) if decision else NOTHING,
        prediction_error=_signed(decision.predicted_hit_tokens - usage.hit_tokens) if decision else NOTHING,
        exact=decision.exact if decision else False,
        candidates=_candidates(record),
        routing_notes=_routing_notes(record),
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
        change=None if detail is None else change_view(detail),
        gaps_after=() if gap is None else tool_views(gap, clock, told or {}),
    )


def busy(record: RequestRecord) -> tuple[int, int]:
    """From when to when it ran."""
    stamps = record.stamps
    return stamps.arrived_ns, max(stamps.closed_ns, stamps.arrived_ns)


def change_view(detail: StepDetail) -> ChangeView:
    """What a step changed; its words only where the content policy kept them, else the hashes of the values."""
    differs = ", ".join(name.replace("_", " ") for name in detail.differs)
    change = detail.change
    if change is None:
        return ChangeView(_COMPARED[detail.comparison], differs=differs)
    total = max(change.total_chars, 1)
    other = max(change.total_chars - change.kept_chars - change.repeated_chars, 0)
    bar, at = [], 0
    for kind, chars, words in (
        ("kept", change.kept_chars, "the same as before"),
        ("changed", other, "otherwise, or new"),
        ("repeated", change.repeated_chars, "said before as well, behind the difference"),
    ):
        if chars:
            bar.append(Segment(kind, percent(at, total), percent(chars, total), f"{count(chars)} characters {words}"))
        at += chars
    is_harmless = change.kind in BESIDE_THE_PROMPT
    return ChangeView(
        summary=_BESIDE if is_harmless else _COMPARED[detail.comparison],
        is_harmless=is_harmless,
        kind=change.kind.value.replace("_", " "),
        path=change.path,
        place=f"characters {count(change.start)} to {count(change.end)}",
        before=change.before,
        after=change.after,
        before_hash=change.before_hash,
        after_hash=change.after_hash,
        bar=tuple(bar),
        differs=differs,
    )


def _signed(number: int) -> str:
    return f"{number:+,}".replace("-", "−") if number else "0"


def _read_from(record: RequestRecord, writers: Sequence[Writers | None]) -> tuple[str, ...]:
    """What is known of each tier's hits beside their number: where they were read, who computed them, how old."""
    found = []
    for each in writers:
        where = f"read on {record.instance}" if record.instance else ""
        found.append("; ".join(filter(None, (where, _computed_by(each, record.stamps.arrived_ns)))))
    return tuple(found)


def _computed_by(writers: Writers | None, now_ns: int) -> str:
    if writers is None:
        return ""
    if writers.newest is None or writers.newest_ns is None:
        return "computed before this run"
    age = duration(max(now_ns - writers.newest_ns, 0))
    if writers.oldest is None or writers.oldest_ns is None:
        return f"computed before this run and up to step {writers.newest} ({age} earlier)"
    if writers.count == 1:
        return f"computed by step {writers.newest} ({age} earlier)"
    oldest = duration(max(now_ns - writers.oldest_ns, 0))
    return f"computed by {writers.count} steps, {writers.oldest} to {writers.newest} ({oldest} to {age} earlier)"


def _name(record: RequestRecord) -> str:
    if name := record.labels.get("step_name"):
        return name
    if record.outcome is not Outcome.OK:
        return OUTCOMES[record.outcome]
    names = [call.name for call in record.tool_calls]
    if not names:
        return "answers"
    return f"calls {names[0]}" if len(names) == 1 else f"calls {names[0]} +{len(names) - 1}"


def _bar_label(counts: Sequence[int]) -> str:
    parts = [f"{count(tokens)} {name}" for (_, name, _), tokens in zip(TOKEN_CLASSES, counts, strict=True) if tokens]
    return "Tokens: " + (", ".join(parts) or "none")


def _stages(record: RequestRecord, clock: TimeScale) -> tuple[StageView, ...]:
    """Queue, send, fetch and prefill, then generation, as far as the request came."""
    stamps = record.stamps
    ended_ns = max(stamps.closed_ns, stamps.arrived_ns)
    parts = [(part.kind, part.name, part.start_ns, part.end_ns, part.is_estimate) for part in first_token_parts(record)]
    if stamps.first_token_ns is not None:
        last_ns = max(stamps.last_token_ns or stamps.first_token_ns, stamps.first_token_ns)
        parts.append(("decode", "Generate", stamps.first_token_ns, last_ns, False))
        parts.append(("close", "Close", last_ns, ended_ns, False))
    else:
        start_ns = stamps.arrived_ns
        for kind, name, mark_ns in (("route", "Queue and route", stamps.routed_ns), ("send", "Send", stamps.sent_ns)):
            if mark_ns is not None and mark_ns >= start_ns:
                parts.append((kind, name, start_ns, mark_ns, False))
                start_ns = mark_ns
        parts.append(("prefill", "Until the end, no token came", start_ns, ended_ns, False))
    stages = []
    for kind, name, start_ns, end_ns, is_estimate in parts:
        if end_ns >= start_ns:
            took = ("≈ " if is_estimate else "") + duration(end_ns - start_ns)
            segment = clock.segment(kind, start_ns, end_ns, f"{name}: {took}")
            stages.append(StageView(name, took, segment, is_estimate))
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


def _routing_notes(record: RequestRecord) -> tuple[str, ...]:
    decision, notes = record.decision, list[str]()
    if decision is not None and decision.fetch_from is not None:
        notes.append(f"Pages are read from {decision.fetch_from}.")
    return tuple(notes)


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


def tool_views(gap: Gap, clock: TimeScale, told: Mapping[str, ReceivedSpan]) -> tuple[ToolView, ...]:
    """What filled a gap: the agent's own spans of its calls, and for calls that it told nothing of the gap itself."""
    views = [_told_view(call, told[call.id], clock) for call in gap.calls if call.id in told]
    untold = tuple(call for call in gap.calls if call.id not in told)
    if (untold or not gap.calls) and gap.duration_ns:
        views.append(_gap_view(replace(gap, calls=untold), clock))
    return tuple(views)


def _told_view(call: ToolCall, span: ReceivedSpan, clock: TimeScale) -> ToolView:
    took = duration(max(span.ended_ns - span.started_ns, 0))
    failed = f", failed: {span.error}" if span.error else ""
    title = f"{call.name}: {took}, as the agent itself tells{failed}"
    return _placed(call.name, "told", took, clock.segment("told", span.started_ns, span.ended_ns, title, seen=True))


def _gap_view(gap: Gap, clock: TimeScale) -> ToolView:
    took = duration(gap.duration_ns)
    if gap.kind is GapKind.WAIT:
        names, bounded = "wait", took
        title = f"{took} between this answer and the next request: no tool was asked for"
    else:
        names, bounded = ", ".join(call.name for call in gap.calls), f"≤ {took}"
        shared = f", shared by {len(gap.calls)} parallel calls" if len(gap.calls) > 1 else ""
        title = f"{names}: at most {took}{shared} (inferred from the gap between answer and result)"
    segment = clock.segment(gap.kind.value, gap.started_ns, gap.ended_ns, title, seen=True)
    return _placed(names, gap.kind.value, bounded, segment)


def _placed(label: str, kind: str, bounded: str, segment: Segment) -> ToolView:
    """The time stands beside the bar: behind it, or in front of one that ends near the edge."""
    start = float(segment.x[:-1])
    end = start + float(segment.width[:-1])
    anchor, x = ("end", start) if end > 80.0 else ("start", end)
    return ToolView(label, kind, bounded, (segment,), f"{x:.2f}%", anchor)
