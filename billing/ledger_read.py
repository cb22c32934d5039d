"""Reading the ledger: rows, totals, stored price versions. Any number of readers beside the writers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from billing import schema
from billing.errors import LedgerError
from billing.prices import PriceBook
from billing.reports import LABEL, TIME_HOURS, Report, build_report, check_dimensions, report_of
from billing.rollup import sums_sql
from billing.row import LedgerRow, columns

_FETCH_ROWS = 1000


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which rows; ``None`` is any.

    The period is by ``posted_ns``: arrival, unless its period was closed already. Its end is exclusive.
    """

    since_ns: int | None = None
    until_ns: int | None = None
    run_id: str | None = None
    request_id: str | None = None

    def sql(self) -> tuple[str, list[str | int]]:
        """Return a WHERE clause and its values."""
        tests = {
            "posted_ns >= ?": self.since_ns,
            "posted_ns < ?": self.until_ns,
            "run_id = ?": self.run_id,
            "request_id = ?": self.request_id,
        }
        used = {test: value for test, value in tests.items() if value is not None}
        return (f" WHERE {' AND '.join(used)}" if used else ""), list(used.values())


ALL_ROWS = RowFilter()


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over rows in one currency. Money is nano-units; unpriced rows are counted and add none."""

    currency: str
    requests: int
    unpriced: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    amount_nano: int
    saved_nano: int


_HITS = "hit_device_tokens + hit_host_tokens + hit_disk_tokens + hit_pool_tokens + hit_unknown_tokens"
_TOTALS = f"""
SELECT currency, sum(revision = 0), count(*) - count(amount_nano) - sum(settles_unpriced),
  sum(fresh_tokens + {_HITS} + write_tokens + write_5m_tokens + write_1h_tokens), sum({_HITS}), sum(output_tokens),
  ifnull(sum(amount_nano), 0), ifnull(sum(saved_nano), 0)
FROM requests{{where}} GROUP BY currency ORDER BY currency
"""


class LedgerReader:
    """One read-only connection, used by one thread."""

    def __init__(self, path: Path) -> None:
        """Open an existing ledger. Raises ``LedgerError``."""
        self.path = path
        self._connection = schema.connect_readonly(path)

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def rows(self, where: RowFilter = ALL_ROWS) -> Iterator[LedgerRow]:
        """Go through the rows in the order in which they were written. Raises ``LedgerError``."""
        clause, values = where.sql()
        try:
            cursor = self._connection.execute(
                f"SELECT {', '.join(columns())} FROM requests{clause} ORDER BY seq", values
            )
            while batch := cursor.fetchmany(_FETCH_ROWS):
                for row in batch:
                    yield LedgerRow(*row)
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self.path} cannot be read: {error}") from error

    def totals(self, where: RowFilter = ALL_ROWS) -> list[Totals]:
        """Sum the rows, one total for each currency. Raises ``LedgerError``."""
        clause, values = where.sql()
        try:
            return [Totals(*row) for row in self._connection.execute(_TOTALS.format(where=clause), values)]
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self.path} cannot be read: {error}") from error

    def report(self, by: Sequence[str] = (), where: RowFilter = ALL_ROWS) -> Report:
        """Sum what was asked for: from the rollups what has few values, from rows the rest; all in one snapshot.

        Equal to ``build_report(rows(where), by)``. Raises ``ReportError``, ``LedgerError``.
        """
        if any(name.startswith(LABEL) for name in by):
            return build_report(self.rows(where), by)
        check_dimensions(by)
        equal = {"run": where.run_id, "request": where.request_id}
        times = [TIME_HOURS[name] for name in by if name in TIME_HOURS]
        keys = [name for name in by if name not in TIME_HOURS]
        try:
            self._connection.execute("BEGIN")
            try:
                query = sums_sql(
                    [*keys, "currency"],
                    per_hours=min(times) if times else None,
                    since_ns=where.since_ns,
                    until_ns=where.until_ns,
                    equal={name: value for name, value in equal.items() if value is not None},
                    watermark=self._connection.execute("SELECT seq FROM rolled").fetchone()[0],
                )
                return report_of(by, self._connection.execute(query.sql, dict(query.parameters)))
            finally:
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self.path} cannot be read: {error}") from error

    def refused(self) -> int:
        """Count the rows that the table could not hold and that lie aside. Raises ``LedgerError``."""
        return self.count("refused")

    def count(self, table: Literal["requests", "refused", "rollups", "closings"]) -> int:
        """Count the rows of a table. Raises ``LedgerError``."""
        try:
            count: int = self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self.path} cannot be read: {error}") from error
        return count

    def closings(self) -> list[tuple[int, int, str]]:
        """Return the closed periods as they are stored, oldest first. Raises ``LedgerError``."""
        try:
            return self._connection.execute("SELECT until_ns, closed_ns, totals FROM closings ORDER BY 1").fetchall()
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self.path} cannot be read: {error}") from error

    def corrected(self) -> list[str]:
        """Return the ids of the requests that have corrections. Raises ``LedgerError``."""
        try:
            found = self._connection.execute("SELECT DISTINCT request_id FROM requests WHERE revision > 0 ORDER BY 1")
            return [request_id for (request_id,) in found]
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self.path} cannot be read: {error}") from error

    def history(self, request_id: str) -> list[LedgerRow]:
        """Return all rows of one request, in order of their revisions. Raises ``LedgerError``."""
        return sorted(self.rows(RowFilter(request_id=request_id)), key=lambda row: row.revision)

    def price_books(self) -> dict[str, PriceBook]:
        """Return every stored price version. Raises ``LedgerError``, ``PriceBookError``."""
        try:
            stored = self._connection.execute("SELECT version, body FROM prices").fetchall()
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self.path} cannot be read: {error}") from error
        return {version: PriceBook.from_body(body, f"version {version}") for version, body in stored}
