"""What the trace store answers: runs with their exact sums, as SQL over its tables."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Final


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


def condition_of(where: RunFilter) -> tuple[str, list[object]]:
    """The filter as a condition on the table ``runs``, and its values."""
    conditions = ["1"]
    values: list[object] = []
    for condition, value in (
        ("tenant = ?", where.tenant),
        ("last_ns >= ?", where.since_ns),
        ("last_ns < ?", where.until_ns),
        (_HAS_RECORD.format("model = ?"), where.model),
        (_HAS_RECORD.format("agent = ?"), where.agent),
        (_HAS_RECORD.format("outcome = ?"), where.outcome),
        (_HAS_RECORD.format(f"{_TEAM} = ?"), where.team),
        (_OF_RUN.format(f"total({_HITS}) * 100 < ? * sum(prompt_tokens)"), where.hit_below_percent),
        (_HAS_RECORD.format("1 GROUP BY currency HAVING total(cost_nano) > ?"), where.cost_above_nano),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if where.text:
        conditions.append(f"(instr(lower(run_id), lower(?)) OR {_HAS_RECORD.format('instr(lower(agent), lower(?))')})")
        values += [where.text, where.text]
    if where.failed_only:
        conditions.append(_HAS_RECORD.format("outcome <> 'ok'"))
    if where.unfailed_only:
        conditions.append("NOT " + _HAS_RECORD.format("outcome <> 'ok'"))
    if where.after is not None:
        conditions.append("(last_ns, tenant, run_id) < (?, ?, ?)")
        values += [where.after.last_ns, where.after.tenant, where.after.run_id]
    return " AND ".join(conditions), values


_SAME_RUN: Final = "records.tenant = runs.tenant AND records.run_id = runs.run_id"
_HAS_RECORD: Final = f"EXISTS (SELECT 1 FROM records WHERE {_SAME_RUN} AND {{}})"
_OF_RUN: Final = f"(SELECT {{}} FROM records WHERE {_SAME_RUN})"
_HITS: Final = "hit_device_tokens + hit_host_tokens + hit_disk_tokens + hit_pool_tokens + hit_unknown_tokens"
_TEAM: Final = "json_extract(CAST(body AS TEXT), '$.identity.team')"


def summary(reader: sqlite3.Connection, tenant: str, run_id: str) -> RunSummary:
    """The sums of one run that has at least one record."""
    values = (tenant, run_id)
    sums = reader.execute(
        "SELECT max(agent), min(arrived_ns), max(arrived_ns), count(*), sum(outcome <> 'ok'), sum(prompt_tokens),"
        " sum(hit_device_tokens), sum(hit_host_tokens), sum(hit_disk_tokens), sum(hit_pool_tokens),"
        " sum(hit_unknown_tokens), sum(output_tokens), count(ttft_ns) FROM records WHERE tenant = ? AND run_id = ?",
        values,
    ).fetchone()
    model = reader.execute(
        "SELECT model FROM records WHERE tenant = ? AND run_id = ? ORDER BY step DESC, seq DESC LIMIT 1", values
    ).fetchone()[0]
    median = reader.execute(
        "SELECT ttft_ns FROM records WHERE tenant = ? AND run_id = ? AND ttft_ns IS NOT NULL ORDER BY ttft_ns"
        " LIMIT 1 OFFSET ?",
        (*values, max(0, (sums[12] - 1) // 2)),
    ).fetchone()
    return RunSummary(
        tenant=tenant,
        run_id=run_id,
        agent=sums[0],
        model=model,
        first_ns=sums[1],
        last_ns=sums[2],
        steps=sums[3],
        failed=sums[4],
        prompt_tokens=sums[5],
        hit_tokens=sums[6:11],
        output_tokens=sums[11],
        ttft_p50_ns=median[0] if median else None,
        money=money(reader, "tenant = ? AND run_id = ?", values),
    )


def totals(reader: sqlite3.Connection, tenant: str | None, since_ns: int | None) -> StoreTotals:
    """The sums over one tenant's or everybody's records since a moment."""
    conditions = ["1"]
    values: list[object] = []
    for each, value in (("tenant = ?", tenant), ("arrived_ns >= ?", since_ns)):
        if value is not None:
            conditions.append(each)
            values.append(value)
    condition = " AND ".join(conditions)
    requests, prompt, *hits, output = reader.execute(
        "SELECT count(*), sum(prompt_tokens), sum(hit_device_tokens), sum(hit_host_tokens), sum(hit_disk_tokens),"
        f" sum(hit_pool_tokens), sum(hit_unknown_tokens), sum(output_tokens) FROM records WHERE {condition}",
        values,
    ).fetchone()
    runs = reader.execute(
        f"SELECT count(*) FROM (SELECT DISTINCT tenant, run_id FROM records WHERE run_id IS NOT NULL AND {condition})",
        values,
    ).fetchone()[0]
    device, host, disk, pool, unknown = (tokens or 0 for tokens in hits)
    return StoreTotals(
        requests, runs, prompt or 0, (device, host, disk, pool, unknown), output or 0,
        money(reader, condition, tuple(values)),
    )  # fmt: skip


def money(reader: sqlite3.Connection, condition: str, values: tuple[object, ...]) -> tuple[Money, ...]:
    """Sums by currency. Amounts are summed in two halves, so that no sum of 64-bit integers overflows."""
    rows = reader.execute(
        "SELECT currency, sum(cost_nano >> 32), sum(cost_nano & 4294967295), sum(saved_nano >> 32),"
        f" sum(saved_nano & 4294967295), sum(cost_nano IS NULL) FROM records WHERE {condition}"
        " GROUP BY currency ORDER BY currency",
        values,
    ).fetchall()
    return tuple(
        Money(currency, ((high or 0) << 32) + (low or 0), ((saved_high or 0) << 32) + (saved_low or 0), unpriced)
        for currency, high, low, saved_high, saved_low, unpriced in rows
    )
