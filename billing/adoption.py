"""Importing the journals of processes that are gone: their rows, and what stands for requests that died with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from billing.database import Values
from billing.entry import decode
from billing.journal import Orphan, adopt
from billing.row import LedgerRow

log = logging.getLogger("keepwarm.billing.ledger")

Write = Callable[[Sequence[Values], bool], int]
"""Commits rows, the second argument: only where none is there; returns how many were there already."""


@dataclass(slots=True)
class Adopted:
    """What was found in the journal of one process."""

    recovered: int = 0  # rows that the database did not hold
    died: int = 0  # requests that were admitted and have no row of their own
    damaged_bytes: int = 0


class Adoption:
    """Imports what is in a folder. ``told`` is given the rows that stand for the requests of a journal, once they are
    committed and before it goes; it may be given some twice."""

    def __init__(
        self,
        directory: Path,
        *,
        write: Write,
        stored: Callable[[Sequence[str]], list[Values]],
        group_rows: int,
        told: Callable[[Sequence[LedgerRow]], None] | None,
    ) -> None:
        self._directory, self._write, self._stored = directory, write, stored
        self._group_rows, self._told = group_rows, told

    def run(self, count: Callable[[Adopted], None]) -> None:
        """Import every journal whose writer is gone; one goes only after its rows are committed.

        A request that was admitted and has no row died with its process: the row is the one that its admission holds.
        An admission stands in the journal before its row. Raises ``LedgerError``, ``OSError``; the rest is left.
        """
        for orphan in adopt(self._directory):
            count(self._import(orphan))

    def _import(self, orphan: Orphan) -> Adopted:
        result = Adopted()
        rows: list[Values] = []
        lost: dict[str, Values] = {}
        for payload in orphan.payloads():
            entry = decode(payload)
            if entry.is_admission:
                lost[entry.request_id] = entry.values
                continue
            lost.pop(entry.request_id, None)
            rows.append(entry.values)
            if len(rows) >= self._group_rows:
                result.recovered += self._commit(rows)
                rows = []
        result.recovered += self._commit(rows)
        died = list(lost.values())
        for start in range(0, len(died), self._group_rows):
            result.died += self._commit(died[start : start + self._group_rows], only_if_absent=True)
        result.damaged_bytes = orphan.damaged_bytes
        if result.died:
            log.warning("%s: %d requests died with the process that served them", orphan.paths[-1], result.died)
        if orphan.damaged_bytes:
            log.error("journal %s: %d bytes cannot be read; kept as .damaged", orphan.paths[-1], orphan.damaged_bytes)
        return result

    def _commit(self, rows: Sequence[Values], *, only_if_absent: bool = False) -> int:
        if not rows:
            return 0
        new = len(rows) - self._write(rows, only_if_absent)
        if self._told is not None:
            stored = self._stored([str(values[0]) for values in rows])  # a row that was there already is the one
            self._told([LedgerRow(*values) for values in stored if not values[1]])  # type: ignore[arg-type]
        return new
