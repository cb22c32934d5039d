"""Retention: rows of periods that are closed and no longer needed go; their sums stay for ever.

A removal is noted first, with the sums of all that it removes, and from then on no reader counts the rows themselves;
then they are deleted (in PostgreSQL their months' tables dropped). Whoever is killed in between leaves rows that nobody
counts, and the next removal takes them along. The tables let nothing else be deleted, and nothing that is not closed.
Rollups are kept: reports by team, model, key … over whole hours, and by run, step or label over whole days, say the
same as before. What needs the rows themselves is an error that says so.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from billing.database import Place, database_at
from billing.errors import PeriodError
from billing.ledger_read import LedgerReader, Removal, RowFilter
from billing.rollup import advance, watermark

_MONTHS = 12


def month_start_ns(now_ns: int, months_back: int) -> int:
    """Return the first instant (UTC) of the month that lies so many months before the one of ``now_ns``."""
    now = datetime.fromtimestamp(now_ns // 10**9, UTC)
    year, month = divmod(now.year * _MONTHS + now.month - 1 - months_back, _MONTHS)
    return int(datetime(year, month + 1, 1, tzinfo=UTC).timestamp()) * 10**9


def remove_rows(place: Place, before_ns: int, now_ns: int) -> tuple[Removal, int]:
    """Remove the rows that are posted before an instant; return what is removed by now, and how many rows that were.

    Raises ``PeriodError`` for an instant that begins no month or up to which the ledger is not closed, ``LedgerError``.
    """
    if month_start_ns(before_ns, 0) != before_ns:
        raise PeriodError(f"{_utc(before_ns)} is not the first instant of a month (UTC)")
    session = database_at(place).open()
    try:
        while advance(session):
            pass
        with session.writing():
            ((closed_ns,),) = session.query("SELECT max(until_ns) FROM closings")
            if closed_ns is None or closed_ns < before_ns:
                raise PeriodError(f"the ledger is not closed until {_utc(before_ns)}: close it first")
            ((last_seq,),) = session.query(
                "SELECT max(seq) FROM requests WHERE posted_ns < :before", {"before": before_ns}
            )
            if last_seq is not None and last_seq > watermark(session):
                raise PeriodError("the rollups were not brought up: try again")
            with LedgerReader(place) as reader:  # nobody else can write meanwhile
                removal = reader.removal()
                if removal is None or removal.before_ns < before_ns:
                    totals = tuple(reader.totals(RowFilter(until_ns=before_ns)))
                    removal = Removal(before_ns, now_ns, totals)
                    session.execute(
                        "INSERT INTO removals (before_ns, removed_ns, totals) VALUES (:before, :now, :totals)",
                        {"before": before_ns, "now": now_ns, "totals": msgspec.json.encode(totals).decode()},
                    )
        return removal, session.remove_rows(removal.before_ns)
    finally:
        session.close()


def _utc(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, UTC).isoformat()
