"""Many runs at once: which agents, tools and steps take longest and cost most, and what runs wait for. Pure.

The critical path of a run is the chain of steps that its last answer depended on, back to the first: what lies on it is
what the run took. Times of tools are upper bounds (``gaps``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from tracing.gaps import GapKind, gap_between, gaps
from tracing.record import RequestRecord

PHASES: Final = ("queue", "prefill", "decode", "tool", "wait", "other")
"""Arrival to sending; sending to the first token; first to last token; tools; nobody asked; the rest."""


@dataclass(slots=True)
class Sums:
    """One agent's, tool's or step name's."""

    name: str
    count: int = 0
    failed: int = 0
    durations_ns: list[int] = field(default_factory=list)
    ttfts_ns: list[int] = field(default_factory=list)
    tpots_ns: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    cost_nano: dict[str, int] = field(default_factory=dict)
    good: int = 0  # answered within the objectives

    @property
    def total_ns(self) -> int:
        """All of its time."""
        return sum(self.durations_ns)


@dataclass(frozen=True, slots=True)
class Objectives:
    """What counts as a good answer; ``None``: whatever comes."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None

    def are_met(self, record: RequestRecord) -> bool:
        """Tell whether an answer was delivered whole and in time."""
        ttft, tpot = record.stamps.ttft_ns, tpot_ns(record)
        if record.outcome != "ok" or (self.ttft_ns is not None and ttft is not None and ttft > self.ttft_ns):
            return False
        return not (self.tpot_ns is not None and tpot is not None and tpot > self.tpot_ns)


@dataclass(frozen=True, slots=True)
class Analysis:
    """What came out; the lists have the longest total time first."""

    runs: int
    requests: int
    agents: list[Sums]
    tools: list[Sums]
    steps: list[Sums]
    critical_ns: dict[str, int]  # by :data:`PHASES`, over all runs
    slowest: list[RequestRecord]
    dearest: list[RequestRecord]


def analyze(records: Iterable[RequestRecord], objectives: Objectives | None = None, *, most: int = 10) -> Analysis:
    """Sum up records, in order of arrival. O(records); holds them."""
    agents: dict[str, Sums] = {}
    tools: dict[str, Sums] = {}
    steps: dict[str, Sums] = {}
    runs: dict[tuple[str, str], list[RequestRecord]] = {}
    held = list(records)
    for record in held:
        good = (objectives or Objectives()).are_met(record)
        for sums, name in (
            (agents, record.labels.get("agent") or f"key {record.identity.key_id}"),
            (steps, record.labels.get("step_name") or f"{record.endpoint} {record.model}"),
        ):
            _add(sums.setdefault(name, Sums(name)), record, good=good)
        if record.link is not None:
            runs.setdefault((record.identity.tenant, record.link.run_id), []).append(record)
    critical = dict.fromkeys(PHASES, 0)
    for run in runs.values():
        for gap in gaps(run):
            for call in gap.calls:
                tool = tools.setdefault(call.name, Sums(call.name))
                tool.count += 1
                tool.durations_ns.append(gap.duration_ns)
        for phase, time_ns in critical_path(run).items():
            critical[phase] += time_ns
    return Analysis(
        len(runs),
        len(held),
        _longest(agents),
        _longest(tools),
        _longest(steps),
        critical,
        sorted(held, key=lambda r: r.stamps.arrived_ns - r.stamps.closed_ns)[:most],
        sorted(held, key=lambda r: -(r.charge.amount_nano or 0))[:most],
    )


def critical_path(records: Sequence[RequestRecord]) -> dict[str, int]:
    """What a run's last answer waited for, by phase, in ns. The phases sum to the time from the first step on the path
    to the end of the last."""
    spent = dict.fromkeys(PHASES, 0)
    if not records:
        return spent
    by_id = {record.request_id: record for record in records}
    at: RequestRecord | None = max(records, key=lambda record: record.stamps.closed_ns)
    seen: set[str] = set()
    while at is not None and at.request_id not in seen:
        seen.add(at.request_id)
        for phase, time_ns in phases(at).items():
            spent[phase] += time_ns
        previous = by_id.get(at.link.previous_request_id or "") if at.link is not None else None
        if previous is not None:
            gap = gap_between(previous, at)
            kind = "other" if gap is None else "tool" if gap.kind is GapKind.TOOL else "wait"
            spent[kind] += max(at.stamps.arrived_ns - previous.stamps.closed_ns, 0)
        at = previous
    return spent


def phases(record: RequestRecord) -> dict[str, int]:
    """One step's time by phase; all of them together are its duration."""
    stamps = record.stamps
    end = max(stamps.closed_ns, stamps.arrived_ns)
    sent = stamps.sent_ns if stamps.sent_ns is not None else end
    first = stamps.first_token_ns if stamps.first_token_ns is not None else end
    last = stamps.last_token_ns if stamps.last_token_ns is not None else first
    return {
        "queue": max(sent - stamps.arrived_ns, 0),
        "prefill": max(first - sent, 0),
        "decode": max(last - first, 0),
        "other": max(end - last, 0),
    }


def tpot_ns(record: RequestRecord) -> int | None:
    """Time of each further output token, ``None`` where a stream did not show it."""
    stamps, further = record.stamps, record.usage.output_tokens - 1
    if stamps.first_token_ns is None or stamps.last_token_ns is None or further < 1 or not record.stream:
        return None
    return (stamps.last_token_ns - stamps.first_token_ns) // further


def percentile(values: Sequence[int], share: float) -> int | None:
    """The value that so much of the others do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(ceil(len(ordered) * share), 1) - 1] if ordered else None


def analysis_json(found: Analysis) -> dict[str, object]:
    """Everything as values that JSON holds."""
    return {
        "runs": found.runs,
        "requests": found.requests,
        "critical_path_ns": found.critical_ns,
        "agents": [_sums_json(each) for each in found.agents],
        "tools": [_sums_json(each) for each in found.tools],
        "steps": [_sums_json(each) for each in found.steps],
        "slowest": [_step_json(each) for each in found.slowest],
        "dearest": [_step_json(each) for each in found.dearest],
    }


def _sums_json(sums: Sums) -> dict[str, object]:
    return {
        "name": sums.name,
        "count": sums.count,
        "failed": sums.failed,
        "total_ns": sums.total_ns,
        "p50_ns": percentile(sums.durations_ns, 0.5),
        "p95_ns": percentile(sums.durations_ns, 0.95),
        "ttft_p50_ns": percentile(sums.ttfts_ns, 0.5),
        "tpot_p50_ns": percentile(sums.tpots_ns, 0.5),
        "prompt_tokens": sums.prompt_tokens,
        "hit_tokens": sums.hit_tokens,
        "output_tokens": sums.output_tokens,
        "cost_nano": sums.cost_nano,
        "good": sums.good,
    }


def _step_json(record: RequestRecord) -> dict[str, object]:
    link = record.link
    return {
        "request_id": record.request_id,
        "run_id": link.run_id if link is not None else None,
        "step": link.step if link is not None else None,
        "duration_ns": record.stamps.closed_ns - record.stamps.arrived_ns,
        "amount_nano": record.charge.amount_nano,
        "currency": record.charge.currency,
    }


def _add(sums: Sums, record: RequestRecord, *, good: bool) -> None:
    usage, stamps = record.usage, record.stamps
    sums.count += 1
    sums.failed += record.outcome != "ok"
    sums.durations_ns.append(max(stamps.closed_ns - stamps.arrived_ns, 0))
    if stamps.ttft_ns is not None:
        sums.ttfts_ns.append(stamps.ttft_ns)
    if (each := tpot_ns(record)) is not None:
        sums.tpots_ns.append(each)
    sums.prompt_tokens += usage.prompt_tokens
    sums.hit_tokens += usage.hit_tokens
    sums.output_tokens += usage.output_tokens
    sums.good += good
    if (amount := record.charge.amount_nano) is not None:
        sums.cost_nano[record.charge.currency] = sums.cost_nano.get(record.charge.currency, 0) + amount


def _longest(sums: Mapping[str, Sums]) -> list[Sums]:
    return sorted(sums.values(), key=lambda each: (-each.total_ns, each.name))
