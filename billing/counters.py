"""The ledger's sums as running counters: begun with everything it holds, then brought up row by row.

Each ``refresh`` adds the rows that were committed since, whoever wrote them, corrections included; so what is shown is
always the sum of committed rows, also right after a start.
"""

from __future__ import annotations

import threading

from billing.database import LedgerSession, Line, Place, database_at
from billing.errors import LedgerError
from billing.reports import Sums, report_of
from billing.rollup import KEYS, SUMS, watermark
from billing.rollup_query import Question, queries

#: By what sums are kept apart.
DIMENSIONS = ("served_model", "outcome")

_NEW_ROWS = f"""
SELECT 0, {", ".join(KEYS[name] for name in (*DIMENSIONS, "currency"))}, {", ".join(f"sum({s})" for s in SUMS.values())}
FROM requests WHERE seq > :seq AND seq <= :last GROUP BY {", ".join(map(str, range(2, 3 + len(DIMENSIONS))))}
"""


class LedgerCounters:
    """Sums by ``DIMENSIONS`` and currency. Thread-safe. A database that is away is tried again by each ``refresh``."""

    def __init__(self, place: Place) -> None:
        self._database, self._lock = database_at(place), threading.Lock()
        self._session: LedgerSession | None = None
        self._sums: dict[tuple[tuple[str, ...], str], Sums] = {}
        self._seq: int | None = None

    def refresh(self) -> dict[tuple[tuple[str, ...], str], Sums]:
        """Return the sums of all committed rows, keyed by dimensions and currency. Raises ``LedgerError``.

        Cost: the first time the ledger's days, then the rows since the last call.
        """
        with self._lock:
            try:
                if self._session is None:
                    self._session = self._database.open_readonly()
                with self._session.reading():
                    self._bring_up(self._session)
            except LedgerError:
                self._close()
                raise
            return dict(self._sums)

    def close(self) -> None:
        """Close the session."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _bring_up(self, session: LedgerSession) -> None:
        last = int(session.query("SELECT coalesce(max(seq), 0) FROM requests")[0][0])
        if self._seq is None:
            ask = queries(
                Question((*DIMENSIONS, "currency")), watermark(session), (-(10**7), 10**7), session.labels_sql
            )
            lines = [line for query in ask for line in session.query(query.sql, query.parameters)]
        elif last > self._seq:
            lines = session.query(_NEW_ROWS, {"seq": self._seq, "last": last})
        else:
            return
        self._add(lines)
        self._seq = last

    def _add(self, lines: list[Line]) -> None:
        for group in report_of(DIMENSIONS, lines).groups:
            self._sums.setdefault((group.key, group.currency), Sums()).add(group.sums)
