"""What the trace store tells of a time: sums by bucket, times to the first token, and what is new."""

from __future__ import annotations

from dataclasses import dataclass

from tracing.store_database import SqlValue, TraceSession
from tracing.store_lists import FAILED, HITS, sum_of


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


def buckets(session: TraceSession, tenant: str | None, since_ns: int, until_ns: int, bucket_ns: int) -> list[Bucket]:
    """The buckets of a time that hold a record, oldest first, counted from ``since_ns``. Cost: its records."""
    rows = session.query(
        f"SELECT (arrived_ns - :since) / :bucket, count(*), {FAILED}, {sum_of('prompt_tokens')}, {sum_of(HITS)},"
        f" {sum_of('output_tokens')} FROM records WHERE arrived_ns >= :since AND arrived_ns < :until{_of(tenant)}"
        " GROUP BY 1 ORDER BY 1",
        {"since": since_ns, "until": until_ns, "bucket": bucket_ns, **_value(tenant)},
    )
    return [Bucket(since_ns + number * bucket_ns, *sums) for number, *sums in rows]


def ttfts(session: TraceSession, tenant: str | None, since_ns: int, until_ns: int, limit: int) -> list[int]:
    """The times to the first token of at most ``limit`` records of a time, the newest ones, in ns, ascending."""
    rows = session.query(
        "SELECT ttft_ns FROM records WHERE arrived_ns >= :since AND arrived_ns < :until AND ttft_ns IS NOT NULL"
        f"{_of(tenant)} ORDER BY arrived_ns DESC LIMIT :limit",
        {"since": since_ns, "until": until_ns, "limit": limit, **_value(tenant)},
    )
    return sorted(row[0] for row in rows)


def newest(session: TraceSession) -> int:
    """The number of the last record that was stored, 0 before the first."""
    return int(session.query("SELECT coalesce(max(seq), 0) FROM records")[0][0])


def choices(session: TraceSession, tenant: str | None, newest_records: int) -> Choices:
    """The names in the newest records. Cost: those records."""
    rows = session.query(
        "SELECT DISTINCT model, agent, team FROM (SELECT model, agent, team FROM records"
        f" WHERE 1 = 1{_of(tenant)} ORDER BY seq DESC LIMIT :limit) AS newest",
        {"limit": newest_records, **_value(tenant)},
    )
    models, agents, teams = (tuple(sorted({row[column] for row in rows if row[column]})) for column in range(3))
    return Choices(models, agents, teams)


def _of(tenant: str | None) -> str:
    return "" if tenant is None else " AND tenant = :tenant"


def _value(tenant: str | None) -> dict[str, SqlValue]:
    return {} if tenant is None else {"tenant": tenant}
