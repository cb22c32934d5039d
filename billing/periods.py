"""Closing periods: what was reported stays. Rows that come later are posted to the first instant that is open.

Closing stores the sums of everything that is posted before an instant; from then on the table refuses rows before it,
and verification compares the sums again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from billing.corrections import values_of
from billing.database import Place, database_at
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


def close_period(place: Place, until_ns: int, now_ns: int) -> Closing:
    """Close the ledger up to an instant. Raises ``PeriodError``, ``LedgerError``.

    It waits for nobody: rows still under way are posted after it.
    """
    if until_ns > now_ns:
        raise PeriodError(f"{_utc(until_ns)} is not over yet")
    session = database_at(place).open()
    try:
        with session.writing():
            ((last,),) = session.query("SELECT max(until_ns) FROM closings")
            if last is not None and until_ns <= last:
                raise PeriodError(f"the ledger is closed until {_utc(last)} already")
            with LedgerReader(place) as reader:  # nobody else can write meanwhile
                totals = tuple(reader.totals(RowFilter(until_ns=until_ns)))
            session.execute(
                "INSERT INTO closings (until_ns, closed_ns, totals) VALUES (:until, :closed, :totals)",
                {"until": until_ns, "closed": now_ns, "totals": msgspec.json.encode(totals).decode()},
            )
    finally:
        session.close()
    return Closing(until_ns, now_ns, totals)


def closings(reader: LedgerReader) -> list[Closing]:
    """Return what was closed, oldest first. Raises ``LedgerError``."""
    return [
        Closing(until_ns, closed_ns, tuple(msgspec.json.decode(totals, type=list[Totals])))
        for until_ns, closed_ns, totals in reader.closings()
    ]


def post(place: Place, rows: Sequence[LedgerRow]) -> int:
    """Write corrections in one transaction; return how many were new. Raises ``PeriodError``, ``LedgerError``."""
    session = database_at(place).open()
    try:
        written = write_group(session, [values_of(row) for row in rows])
    finally:
        session.close()
    if written.conflicts or written.refused:
        raise PeriodError(f"others corrected these meanwhile: {', '.join(written.conflicts)} {written.refused}")
    return len(rows) - written.duplicates


def _utc(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, UTC).isoformat()
