"""Closing periods: what was reported stays. Rows that come later are posted to the first instant that is open.

Closing stores the sums of everything that is posted before an instant; from then on the table refuses rows before it,
and verification compares the sums again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from billing import schema
from billing.corrections import values_of
from billing.errors import PeriodError
from billing.group import write_group
from billing.ledger_read import LedgerReader, RowFilter, Totals
from billing.row import LedgerRow


@dataclass(frozen=True, slots=True)
class Closing:
    """A closed period: everything posted before ``until_ns``, from the beginning, and its sums by currency."""

    until_ns: int
    closed_ns: int
    totals: tuple[Totals, ...]


def close_period(path: Path, until_ns: int, now_ns: int) -> Closing:
    """Close the ledger up to an instant. Raises ``PeriodError``, ``LedgerError``.

    It waits for nobody: rows still under way are posted after it.
    """
    if until_ns > now_ns:
        raise PeriodError(f"{_utc(until_ns)} is not over yet")
    connection = schema.connect(path)
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            last = connection.execute("SELECT max(until_ns) FROM closings").fetchone()[0]
            if last is not None and until_ns <= last:
                raise PeriodError(f"the ledger is closed until {_utc(last)} already")
            with LedgerReader(path) as reader:  # nobody else can write meanwhile
                totals = tuple(reader.totals(RowFilter(until_ns=until_ns)))
            body = msgspec.json.encode(totals).decode()
            connection.execute("INSERT INTO closings VALUES (?, ?, ?)", (until_ns, now_ns, body))
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    finally:
        connection.close()
    return Closing(until_ns, now_ns, totals)


def closings(reader: LedgerReader) -> list[Closing]:
    """Return what was closed, oldest first. Raises ``LedgerError``."""
    return [
        Closing(until_ns, closed_ns, tuple(msgspec.json.decode(totals, type=list[Totals])))
        for until_ns, closed_ns, totals in reader.closings()
    ]


def post(path: Path, rows: Sequence[LedgerRow]) -> int:
    """Write corrections in one transaction; return how many were new. Raises ``LedgerError``, ``sqlite3.Error``."""
    connection = schema.connect(path)
    try:
        written = write_group(connection, [values_of(row) for row in rows])
    finally:
        connection.close()
    if written.conflicts or written.refused:
        raise PeriodError(f"others corrected these meanwhile: {', '.join(written.conflicts)} {written.refused}")
    return len(rows) - written.duplicates


def _utc(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, UTC).isoformat()
