"""The writing side of the trace store: one transaction a batch, and the bounds of what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracing.store_database import Parameters, Row, TraceSession, listed
from tracing.store_schema import LIST_RUNS, Statement


@dataclass(frozen=True, slots=True)
class TraceStoreOptions:
    """Bounds of the store. ``None`` means unbounded."""

    max_records: int | None = 1_000_000  # ended runs go first, oldest and whole, then the first steps of others
    max_age_ns: int | None = 30 * 24 * 3600 * 10**9
    max_spans: int | None = 1_000_000  # received from agents; the oldest go first
    queue_records: int = 10_000  # appended and not yet committed
    batch_records: int = 512  # in one transaction
    retention_records: int = 1000  # appended between two looks at the bounds: how far they can be overrun


def commit(session: TraceSession, rows: Sequence[Row], statements: Sequence[Statement] = ()) -> None:
    """Store rows of :func:`tracing.store_schema.row_of`; one that is there is not stored again.

    ``statements`` are run behind them.
    """
    if rows:
        session.insert(rows)
        if ids := [row[0] for row in rows if row[2] is not None]:
            names, values = listed("id", ids)
            session.execute(LIST_RUNS.format(names), values)
    for sql, parameters in statements:
        session.execute(sql, parameters)


def forget_old(session: TraceSession, options: TraceStoreOptions, now_ns: int) -> None:
    """Delete what is too old, then the oldest runs until the rest fits; a single run over the bound is trimmed."""
    if options.max_age_ns is not None:
        oldest = {"oldest": now_ns - options.max_age_ns}
        _delete_runs(session, "last_ns < :oldest", oldest)
        session.execute("DELETE FROM records WHERE run_id IS NULL AND arrived_ns < :oldest", oldest)
        session.execute("DELETE FROM spans WHERE received_ns < :oldest", oldest)
        session.execute("DELETE FROM lives WHERE began_ns < :oldest", oldest)
    if options.max_records is not None:
        _trim(session, options.max_records)
    if options.max_spans is not None:
        session.execute(
            "DELETE FROM spans WHERE received_ns <="
            " (SELECT received_ns FROM spans ORDER BY received_ns DESC LIMIT 1 OFFSET :most)",
            {"most": options.max_spans},
        )


def _trim(session: TraceSession, max_records: int) -> None:
    excess = _count(session) - max_records
    if excess <= 0:
        return
    ((cut_ns,),) = session.query(
        "SELECT arrived_ns FROM records ORDER BY arrived_ns LIMIT 1 OFFSET :at", {"at": excess - 1}
    )
    cut = {"cut": cut_ns}
    session.execute("DELETE FROM records WHERE run_id IS NULL AND arrived_ns <= :cut", cut)
    _delete_runs(session, "last_ns <= :cut", cut)
    excess = _count(session) - max_records
    if excess > 0:  # long runs that are still in use lose their first steps
        session.execute(
            "DELETE FROM records WHERE seq IN (SELECT seq FROM records ORDER BY arrived_ns LIMIT :excess)",
            {"excess": excess},
        )
        session.execute(
            "DELETE FROM runs WHERE NOT EXISTS"
            " (SELECT 1 FROM records WHERE records.tenant = runs.tenant AND records.run_id = runs.run_id)"
        )


def _count(session: TraceSession) -> int:
    return int(session.query("SELECT count(*) FROM records")[0][0])


def _delete_runs(session: TraceSession, condition: str, parameters: Parameters) -> None:
    session.execute(
        f"DELETE FROM records WHERE (tenant, run_id) IN (SELECT tenant, run_id FROM runs WHERE {condition})", parameters
    )
    session.execute(f"DELETE FROM runs WHERE {condition}", parameters)
