"""The ledger's sums as running counters: begun with everything it holds, then brought up row by row.

Each ``refresh`` adds the rows that were committed since, whoever wrote them, corrections included; so what is shown is
always the sum of committed rows, also right after a start.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from billing import schema
from billing.errors import LedgerError
from billing.reports import Sums, report_of
from billing.rollup import KEYS, SUMS, sums_sql

#: By what sums are kept apart.
DIMENSIONS = ("served_model", "outcome")

_NEW_ROWS = f"""
SELECT 0, {", ".join(KEYS[name] for name in (*DIMENSIONS, "currency"))}, {", ".join(f"sum({s})" for s in SUMS.values())}
FROM requests WHERE seq > ? AND seq <= ? GROUP BY {", ".join(map(str, range(2, 3 + len(DIMENSIONS))))}
"""


class LedgerCounters:
    """Sums by ``DIMENSIONS`` and currency. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read everything once. Raises ``LedgerError``."""
        self._path, self._lock = path, threading.Lock()
        self._connection = schema.connect_readonly(path, check_same_thread=False)
        self._sums: dict[tuple[tuple[str, ...], str], Sums] = {}
        self._seq = 0
        with self._lock:
            self._begin()

    def refresh(self) -> dict[tuple[tuple[str, ...], str], Sums]:
        """Return the sums of all committed rows, keyed by dimensions and currency. Raises ``LedgerError``.

        Cost: the rows since the last call.
        """
        with self._lock:
            try:
                last = self._last()
                if last > self._seq:
                    self._add(self._connection.execute(_NEW_ROWS, (self._seq, last)).fetchall())
                    self._seq = last
            except sqlite3.Error as error:
                raise LedgerError(f"ledger {self._path} cannot be read: {error}") from error
            return dict(self._sums)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    def _begin(self) -> None:
        try:
            self._connection.execute("BEGIN")
            try:
                self._seq = self._last()
                query = sums_sql(
                    [*DIMENSIONS, "currency"],
                    per_hours=None,
                    since_ns=None,
                    until_ns=None,
                    equal={},
                    watermark=self._connection.execute("SELECT seq FROM rolled").fetchone()[0],
                )
                self._add(self._connection.execute(query.sql, dict(query.parameters)).fetchall())
            finally:
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self._path} cannot be read: {error}") from error

    def _last(self) -> int:
        return int(self._connection.execute("SELECT ifnull(max(seq), 0) FROM requests").fetchone()[0])

    def _add(self, lines: list[tuple[object, ...]]) -> None:
        for group in report_of(DIMENSIONS, lines).groups:
            self._sums.setdefault((group.key, group.currency), Sums()).add(group.sums)
