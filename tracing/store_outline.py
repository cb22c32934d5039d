"""A run in outline: one light row a step, from the columns alone, so that a run of thousands of steps opens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tracing.record import RequestRecord
from tracing.store_database import TraceSession
from tracing.store_lists import Money, RunSummary


class StepOutline(NamedTuple):
    """One request of a run. ``hit_tokens``: device, host, disk, pool, unknown."""

    step: int
    request_id: str
    arrived_ns: int
    outcome: str
    model: str
    prompt_tokens: int
    hit_tokens: tuple[int, int, int, int, int]
    output_tokens: int
    ttft_ns: int | None


@dataclass(frozen=True, slots=True)
class RunOutline:
    """A run's exact sums and its steps in order."""

    summary: RunSummary
    steps: Sequence[StepOutline]


@dataclass(frozen=True, slots=True)
class RunCall:
    """A run that another one called for: a sub-agent's."""

    run_id: str
    parent_run_id: str
    parent_request_id: str | None
    parent_call_id: str | None


def called_runs(session: TraceSession, tenant: str, since_ns: int, until_ns: int, limit: int) -> list[RunCall]:
    """The runs that began in a time and were called for by others, oldest first. Cost: the first steps of that time."""
    rows = session.query(
        "SELECT run_id, parent_run_id, parent_request_id, parent_call_id FROM records"
        " WHERE arrived_ns >= :since AND arrived_ns <= :until AND tenant = :tenant AND step = 1"
        " AND run_id IS NOT NULL AND parent_run_id IS NOT NULL ORDER BY arrived_ns LIMIT :limit",
        {"since": since_ns, "until": until_ns, "tenant": tenant, "limit": limit},
    )
    return [RunCall(*row) for row in rows]


def outline(session: TraceSession, tenant: str, run_id: str) -> RunOutline | None:
    """The outline of a run, ``None`` where it has no record. Cost: one pass, about 8 µs a step."""
    rows = session.query(
        "SELECT step, request_id, arrived_ns, outcome, model, prompt_tokens, hit_device_tokens, hit_host_tokens,"
        " hit_disk_tokens, hit_pool_tokens, hit_unknown_tokens, output_tokens, ttft_ns, agent, currency, cost_nano,"
        " saved_nano FROM records WHERE tenant = :tenant AND run_id = :run_id ORDER BY step, seq",
        {"tenant": tenant, "run_id": run_id},
    )
    if not rows:
        return None
    steps = [StepOutline._make((*row[:6], row[6:11], row[11], row[12])) for row in rows]
    agent = max((row[13] for row in rows if row[13] is not None), default=None)
    return RunOutline(summary_of(tenant, run_id, agent, steps, _money(rows)), steps)


def summary_of(
    tenant: str, run_id: str, agent: str | None, steps: Sequence[StepOutline], money: tuple[Money, ...]
) -> RunSummary:
    """The sums of a run whose steps are all at hand; what ``tracing.store_lists.summary`` asks the database for."""
    device, host, disk, pool, unknown = (sum(tier) for tier in zip(*(step.hit_tokens for step in steps), strict=True))
    ttfts = sorted(step.ttft_ns for step in steps if step.ttft_ns is not None)
    return RunSummary(
        tenant=tenant,
        run_id=run_id,
        agent=agent,
        model=steps[-1].model,
        first_ns=min(step.arrived_ns for step in steps),
        last_ns=max(step.arrived_ns for step in steps),
        steps=len(steps),
        failed=sum(step.outcome != "ok" for step in steps),
        prompt_tokens=sum(step.prompt_tokens for step in steps),
        hit_tokens=(device, host, disk, pool, unknown),
        output_tokens=sum(step.output_tokens for step in steps),
        ttft_p50_ns=ttfts[(len(ttfts) - 1) // 2] if ttfts else None,
        money=money,
    )


def _money(rows: Sequence[tuple[Any, ...]]) -> tuple[Money, ...]:
    sums: dict[str, list[int]] = {}
    for *_, currency, cost, saved in rows:
        each = sums.setdefault(currency, [0, 0, 0])
        each[0] += cost or 0
        each[1] += saved or 0
        each[2] += cost is None
    return tuple(Money(currency, *each) for currency, each in sorted(sums.items()))


def step_outline(record: RequestRecord) -> StepOutline:
    """The same of a record of a run."""
    usage = record.usage
    return StepOutline(
        record.link.step if record.link else 1,
        record.request_id,
        record.stamps.arrived_ns,
        record.outcome.value,
        record.model,
        usage.prompt_tokens,
        (
            usage.hit_device_tokens,
            usage.hit_host_tokens,
            usage.hit_disk_tokens,
            usage.hit_pool_tokens,
            usage.hit_unknown_tokens,
        ),
        usage.output_tokens,
        record.stamps.ttft_ns,
    )
