"""The writing side of the trace store: one transaction a batch, and the bounds of what is kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tracing.store_schema import LIST_RUNS, MIGRATIONS, SCHEMA, SCHEMA_VERSION, SPANS, Row, Statement, insert_sql

#: How many records one statement takes, largest first: while it runs, the interpreter is free for requests.
_CHUNKS = (64, 8, 1)


@dataclass(frozen=True, slots=True)
class TraceStoreOptions:
    """Bounds of the store. ``None`` means unbounded."""

    max_records: int | None = 1_000_000  # ended runs go first, oldest and whole, then the first steps of others
    max_age_ns: int | None = 30 * 24 * 3600 * 10**9
    max_spans: int | None = 1_000_000  # received from agents; the oldest go first
    queue_records: int = 10_000  # appended and not yet committed
    batch_records: int = 512  # in one transaction
    retention_records: int = 1000  # appended between two looks at the bounds: how far they can be overrun


def open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection in WAL mode to the file, which is made when there is none."""
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA busy_timeout = 5000")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        connection.executescript(f"BEGIN; {SCHEMA} {SPANS} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    while 0 < version < SCHEMA_VERSION:
        connection.executescript(f"BEGIN; {MIGRATIONS[version]} PRAGMA user_version = {version + 1}; COMMIT;")
        version += 1
    return connection


def commit(connection: sqlite3.Connection, rows: list[Row], statements: Sequence[Statement] = ()) -> None:
    """Store rows of :func:`tracing.store_schema.row_of` in one transaction; one that is there is not stored again.

    ``statements`` are run behind them.
    """
    if not rows and not statements:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        at = 0
        for chunk in _CHUNKS:
            while len(rows) - at >= chunk:
                connection.execute(insert_sql(chunk), tuple(chain.from_iterable(rows[at : at + chunk])))
                at += chunk
        if ids := [row[0] for row in rows if row[2] is not None]:
            connection.execute(LIST_RUNS.format(", ".join("?" * len(ids))), ids)
        for sql, values in statements:
            connection.execute(sql, values)
        connection.execute("COMMIT")
    except sqlite3.Error:
        connection.execute("ROLLBACK")
        raise


def forget_old(connection: sqlite3.Connection, options: TraceStoreOptions, now_ns: int) -> None:
    """Delete what is too old, then the oldest runs until the rest fits; a single run over the bound is trimmed."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if options.max_age_ns is not None:
            oldest_ns = now_ns - options.max_age_ns
            _delete_runs(connection, "last_ns < ?", (oldest_ns,))
            connection.execute("DELETE FROM records WHERE run_id IS NULL AND arrived_ns < ?", (oldest_ns,))
            connection.execute("DELETE FROM spans WHERE received_ns < ?", (oldest_ns,))
        if options.max_records is not None:
            _trim(connection, options.max_records)
        if options.max_spans is not None:
            connection.execute(
                "DELETE FROM spans WHERE received_ns <="
                " (SELECT received_ns FROM spans ORDER BY received_ns DESC LIMIT 1 OFFSET ?)",
                (options.max_spans,),
            )
        connection.execute("COMMIT")
    except sqlite3.Error:
        connection.execute("ROLLBACK")
        raise


def _trim(connection: sqlite3.Connection, max_records: int) -> None:
    excess = connection.execute("SELECT count(*) FROM records").fetchone()[0] - max_records
    if excess <= 0:
        return
    cut_ns = connection.execute(
        "SELECT arrived_ns FROM records ORDER BY arrived_ns LIMIT 1 OFFSET ?", (excess - 1,)
    ).fetchone()[0]
    connection.execute("DELETE FROM records WHERE run_id IS NULL AND arrived_ns <= ?", (cut_ns,))
    _delete_runs(connection, "last_ns <= ?", (cut_ns,))
    excess = connection.execute("SELECT count(*) FROM records").fetchone()[0] - max_records
    if excess > 0:  # long runs that are still in use lose their first steps
        connection.execute(
            "DELETE FROM records WHERE seq IN (SELECT seq FROM records ORDER BY arrived_ns LIMIT ?)", (excess,)
        )
        connection.execute(
            "DELETE FROM runs WHERE NOT EXISTS"
            " (SELECT 1 FROM records WHERE records.tenant = runs.tenant AND records.run_id = runs.run_id)"
        )


def _delete_runs(connection: sqlite3.Connection, condition: str, values: tuple[object, ...]) -> None:
    connection.execute(
        f"DELETE FROM records WHERE (tenant, run_id) IN (SELECT tenant, run_id FROM runs WHERE {condition})", values
    )
    connection.execute(f"DELETE FROM runs WHERE {condition}", values)
