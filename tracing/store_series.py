"""What the trace store tells of a time: sums by bucket, times to the first token, and what is new."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """Exact sums over the records that arrived from ``start_ns`` on, for one bucket's length."""

    start_ns: int
    requests: int
    failed: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Choices:
    """Names that the newest records bear, for those who filter by them."""

    models: tuple[str, ...]
    agents: tuple[str, ...]
    teams: tuple[str, ...]


def buckets(
    reader: sqlite3.Connection, tenant: str | None, since_ns: int, until_ns: int, bucket_ns: int
) -> list[Bucket]:
    """The buckets of a time that hold a record, oldest first, counted from ``since_ns``. Cost: its records."""
    rows = reader.execute(
        "SELECT (arrived_ns - ?) / ?, count(*), sum(outcome <> 'ok'), sum(prompt_tokens), sum(hit_device_tokens"
        " + hit_host_tokens + hit_disk_tokens + hit_pool_tokens + hit_unknown_tokens), sum(output_tokens)"
        f" FROM records WHERE arrived_ns >= ? AND arrived_ns < ?{_of(tenant)} GROUP BY 1 ORDER BY 1",
        (since_ns, bucket_ns, since_ns, until_ns, *_value(tenant)),
    )
    return [Bucket(since_ns + number * bucket_ns, *sums) for number, *sums in rows]


def ttfts(reader: sqlite3.Connection, tenant: str | None, since_ns: int, until_ns: int, limit: int) -> list[int]:
    """The times to the first token of at most ``limit`` records of a time, the newest ones, in ns, ascending."""
    rows = reader.execute(
        "SELECT ttft_ns FROM records WHERE arrived_ns >= ? AND arrived_ns < ? AND ttft_ns IS NOT NULL"
        f"{_of(tenant)} ORDER BY arrived_ns DESC LIMIT ?",
        (since_ns, until_ns, *_value(tenant), limit),
    )
    return sorted(row[0] for row in rows)


def newest(reader: sqlite3.Connection) -> int:
    """The number of the last record that was stored, 0 before the first."""
    return int(reader.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()[0])


def choices(reader: sqlite3.Connection, tenant: str | None, newest_records: int) -> Choices:
    """The names in the newest records. Cost: those records."""
    where = "" if tenant is None else " WHERE tenant = ?"
    rows = reader.execute(
        "SELECT DISTINCT model, agent, json_extract(CAST(body AS TEXT), '$.identity.team') FROM"
        f" (SELECT model, agent, body FROM records{where} ORDER BY seq DESC LIMIT ?)",
        (*_value(tenant), newest_records),
    ).fetchall()
    models, agents, teams = (tuple(sorted({row[column] for row in rows if row[column]})) for column in range(3))
    return Choices(models, agents, teams)


def _of(tenant: str | None) -> str:
    return "" if tenant is None else " AND tenant = ?"


def _value(tenant: str | None) -> tuple[object, ...]:
    return () if tenant is None else (tenant,)
