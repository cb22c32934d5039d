"""What the trace store answers: runs with their exact sums, as SQL over its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tracing.store_database import Parameters, SqlValue, TraceSession


@dataclass(frozen=True, slots=True)
class Money:
    """Exact sums in one currency. ``unpriced`` requests have no amount and are in no sum."""

    currency: str
    cost_nano: int
    saved_nano: int
    unpriced: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of the runs list: exact sums over the run's records."""

    tenant: str
    run_id: str
    agent: str | None
    model: str
    first_ns: int
    last_ns: int
    steps: int
    failed: int  # requests whose outcome isn't ok
    prompt_tokens: int
    hit_tokens: tuple[int, int, int, int, int]  # device, host, disk, pool, unknown
    output_tokens: int
    ttft_p50_ns: int | None
    money: tuple[Money, ...]


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """Exact sums over all records of a time span, of runs or not."""

    requests: int
    runs: int
    prompt_tokens: int
    hit_tokens: tuple[int, int, int, int, int]  # device, host, disk, pool, unknown
    output_tokens: int
    money: tuple[Money, ...]


@dataclass(frozen=True, slots=True)
class RunKey:
    """A run's place in the list: newest first, equal times by name. The last one of a page leads to the next page."""

    last_ns: int
    tenant: str
    run_id: str


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to list. Times bound the run's last request; ``text`` is part of a run id or an agent's name.

    ``outcome``: some request of the run ended so. ``hit_below_percent`` and ``cost_above_nano`` (of the run's sum in
    any currency) are computed for each run that the other conditions leave, until a page is full.
    """

    tenant: str | None = None
    text: str | None = None
    model: str | None = None
    agent: str | None = None
    team: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None  # exclusive
    failed_only: bool = False
    unfailed_only: bool = False
    outcome: str | None = None
    hit_below_percent: float | None = None
    cost_above_nano: int | None = None
    after: RunKey | None = None  # the runs that follow it in the list


def condition_of(where: RunFilter) -> tuple[str, dict[str, SqlValue]]:
    """The filter as a condition on the table ``runs``, and its parameters."""
    conditions = ["1 = 1"]
    values: dict[str, SqlValue] = {}
    for name, condition, value in (
        ("tenant", "tenant = :tenant", where.tenant),
        ("since", "last_ns >= :since", where.since_ns),
        ("until", "last_ns < :until", where.until_ns),
        ("model", _HAS_RECORD.format("model = :model"), where.model),
        ("agent", _HAS_RECORD.format("agent = :agent"), where.agent),
        ("outcome", _HAS_RECORD.format("outcome = :outcome"), where.outcome),
        ("team", _HAS_RECORD.format("team = :team"), where.team),
        ("percent", _OF_RUN.format(f"sum({HITS}) * 100 < :percent * sum(prompt_tokens)"), where.hit_below_percent),
        ("above", _HAS_RECORD.format(f"1 = 1 GROUP BY currency HAVING {_COST} > :above"), where.cost_above_nano),
        ("like", f"({_says('run_id')} OR {_HAS_RECORD.format(_says('agent'))})", _pattern(where.text)),
    ):
        if value is not None:
            conditions.append(condition)
            values[name] = value
    if where.failed_only:
        conditions.append(_HAS_RECORD.format("outcome <> 'ok'"))
    if where.unfailed_only:
        conditions.append("NOT " + _HAS_RECORD.format("outcome <> 'ok'"))
    if where.after is not None:
        conditions.append("(last_ns, tenant, run_id) < (:after_ns, :after_tenant, :after_run)")
        values |= {"after_ns": where.after.last_ns, "after_tenant": where.after.tenant, "after_run": where.after.run_id}
    return " AND ".join(conditions), values


def _pattern(text: str | None) -> str | None:
    """Return what LIKE finds a text by that stands anywhere."""
    return f"%{text.translate(_LITERALLY)}%" if text else None


def _says(column: str) -> str:
    return f"lower({column}) LIKE lower(:like) ESCAPE '!'"


_LITERALLY: Final = str.maketrans({sign: f"!{sign}" for sign in "!%_"})
_SAME_RUN: Final = "records.tenant = runs.tenant AND records.run_id = runs.run_id"
_HAS_RECORD: Final = f"EXISTS (SELECT 1 FROM records WHERE {_SAME_RUN} AND {{}})"
_OF_RUN: Final = f"(SELECT {{}} FROM records WHERE {_SAME_RUN})"
_COST: Final = "coalesce(sum(CAST(cost_nano AS DOUBLE PRECISION)), 0)"  # a sum of integers might not fit 64 bits
HITS: Final = "hit_device_tokens + hit_host_tokens + hit_disk_tokens + hit_pool_tokens + hit_unknown_tokens"
FAILED: Final = "count(*) FILTER (WHERE outcome <> 'ok')"


def sum_of(what: str) -> str:
    """SQL of a sum that is an int in Python, whichever database says it."""
    return f"CAST(sum({what}) AS BIGINT)"


_SUMS: Final = ", ".join(
    sum_of(name)
    for name in (
        "prompt_tokens", "hit_device_tokens", "hit_host_tokens", "hit_disk_tokens", "hit_pool_tokens",
        "hit_unknown_tokens", "output_tokens",
    )
)  # fmt: skip


_HALVES: Final = ", ".join(
    sum_of(half) for name in ("cost_nano", "saved_nano") for half in (f"{name} >> 32", f"{name} & 4294967295")
)
_MONEY: Final = f"currency, {_HALVES}, count(*) - count(cost_nano)"
"""Amounts are summed in two halves, so that no sum of 64-bit integers overflows."""
_NAMED: Final = (
    "SELECT tenant, run_id, last_ns FROM runs WHERE {} ORDER BY last_ns DESC, tenant DESC, run_id DESC LIMIT :limit"
)
_OF_NAMED: Final = "WITH named AS ({}) SELECT {} FROM named JOIN records USING (tenant, run_id) GROUP BY tenant, run_id"
_LAST_AND_MEDIAN: Final = """
WITH named AS ({}), placed AS (
  SELECT tenant, run_id, model, ttft_ns,
    row_number() OVER (PARTITION BY tenant, run_id ORDER BY step DESC, seq DESC) AS from_last,
    row_number() OVER (PARTITION BY tenant, run_id, ttft_ns IS NULL ORDER BY ttft_ns) AS place,
    count(ttft_ns) OVER (PARTITION BY tenant, run_id) AS timed
  FROM named JOIN records USING (tenant, run_id)
)
SELECT tenant, run_id, max(CASE WHEN from_last = 1 THEN model END),
  max(CASE WHEN ttft_ns IS NOT NULL AND place = (timed - 1) / 2 + 1 THEN ttft_ns END)
FROM placed GROUP BY tenant, run_id
"""


def summaries(session: TraceSession, condition: str, values: Parameters, limit: int) -> list[RunSummary]:
    """The sums of the newest runs that meet a condition, newest first, in four queries. Cost: their records."""
    given, named = {**values, "limit": limit}, _NAMED.format(condition)
    listed = session.query(named, given)
    if not listed:
        return []
    sums = f"tenant, run_id, max(agent), min(arrived_ns), max(arrived_ns), count(*), {FAILED}, {_SUMS}"
    summed = {line[:2]: line[2:] for line in session.query(_OF_NAMED.format(named, sums), given)}
    placed = {line[:2]: line[2:] for line in session.query(_LAST_AND_MEDIAN.format(named), given)}
    amounts: dict[tuple[str, str], list[Money]] = {}
    for tenant, run_id, *amount in session.query(
        _OF_NAMED.format(named, f"tenant, run_id, {_MONEY}") + ", currency ORDER BY currency", given
    ):
        amounts.setdefault((tenant, run_id), []).append(_money_of(*amount))
    found = []
    for tenant, run_id, _ in listed:
        agent, first_ns, last_ns, steps, failed, prompt, *hits, output = summed[tenant, run_id]
        model, median = placed[tenant, run_id]
        device, host, disk, pool, unknown = hits
        found.append(
            RunSummary(
                tenant=tenant,
                run_id=run_id,
                agent=agent,
                model=model,
                first_ns=first_ns,
                last_ns=last_ns,
                steps=steps,
                failed=failed,
                prompt_tokens=prompt,
                hit_tokens=(device, host, disk, pool, unknown),
                output_tokens=output,
                ttft_p50_ns=median,
                money=tuple(amounts[tenant, run_id]),
            )
        )
    return found


def summary(session: TraceSession, tenant: str, run_id: str) -> RunSummary | None:
    """The sums of one run, ``None`` where there is none of that name."""
    values = {"tenant": tenant, "run_id": run_id}
    return next(iter(summaries(session, "tenant = :tenant AND run_id = :run_id", values, 1)), None)


def totals(session: TraceSession, tenant: str | None, since_ns: int | None) -> StoreTotals:
    """The sums over one tenant's or everybody's records since a moment."""
    conditions = ["1 = 1"]
    values: dict[str, SqlValue] = {}
    for name, each, value in (("tenant", "tenant = :tenant", tenant), ("since", "arrived_ns >= :since", since_ns)):
        if value is not None:
            conditions.append(each)
            values[name] = value
    condition = " AND ".join(conditions)
    ((requests, prompt, *hits, output),) = session.query(
        f"SELECT count(*), {_SUMS} FROM records WHERE {condition}", values
    )
    ((runs,),) = session.query(
        "SELECT count(*) FROM (SELECT DISTINCT tenant, run_id FROM records"
        f" WHERE run_id IS NOT NULL AND {condition}) AS named",
        values,
    )
    device, host, disk, pool, unknown = (tokens or 0 for tokens in hits)
    return StoreTotals(
        requests, runs, prompt or 0, (device, host, disk, pool, unknown), output or 0, money(session, condition, values)
    )


def money(session: TraceSession, condition: str, values: Parameters) -> tuple[Money, ...]:
    """Sums by currency."""
    rows = session.query(f"SELECT {_MONEY} FROM records WHERE {condition} GROUP BY currency ORDER BY currency", values)
    return tuple(_money_of(*row) for row in rows)


def _money_of(
    currency: str, high: int | None, low: int | None, saved_high: int | None, saved_low: int | None, unpriced: int
) -> Money:
    return Money(currency, ((high or 0) << 32) + (low or 0), ((saved_high or 0) << 32) + (saved_low or 0), unpriced)
