"""What the ledger needs of a database: SQLite on one machine, PostgreSQL for a fleet. The contract of both.

A ``LedgerDatabase`` says where a ledger is; a ``LedgerSession`` is one connection to it. Everything above them (group
commits, rollups, reports, closing, retention) is written once, in the SQL that both have in common; only how rows are
inserted, how a transaction is begun and how a label is read differ.

``writing`` is the heart of it: within the block nobody else writes to this ledger, on whatever machine, so sequence
numbers are committed in order and a watermark over them is exact; on leaving it, what was written is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from billing.row import SqlValue

Values = tuple[SqlValue, ...]
Parameters = Mapping[str, SqlValue | bytes]
Line = tuple[Any, ...]
"""One line of a result; its types are the query's."""


class LedgerSession(Protocol):
    """One connection, used by one thread at a time. Every method raises ``LedgerError`` when the database fails.

    A failed session stays failed: close it and open another.
    """

    labels_sql: str
    """A FROM item beside ``{table}``: one line ``label(key, value)`` for each label in its column ``labels``."""

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines of a query; parameters are named ``:name``."""

    def stream(self, sql: str, parameters: Parameters | None = None) -> Iterator[Line]:
        """Go through the lines of a query with bounded memory. One at a time."""

    def execute(self, sql: str, parameters: Parameters | None = None) -> int:
        """Run a statement within ``writing``; return how many lines it concerned."""

    def insert_rows(self, rows: Sequence[Values]) -> int:
        """Within ``writing``: insert rows whose (id, revision) is not there yet; return how many that were.

        Raises ``RowsRefused`` when one cannot be held; then none was inserted and the transaction goes on.
        """

    def rows_of(self, request_ids: Sequence[str]) -> list[Values]:
        """Return all stored rows of these requests, as ``billing.row.columns`` orders them."""

    def remove_rows(self, before_ns: int) -> int:
        """Delete the rows posted before an instant that a removal was noted for; return how many are gone.

        Takes transactions of its own. Raises ``LedgerError`` when the database does not let it.
        """

    def reading(self) -> AbstractContextManager[None]:
        """Within the block all queries see one state of the ledger."""

    def writing(self) -> AbstractContextManager[None]:
        """Be the ledger's only writer within the block: committed and synced at its end, rolled back by an error."""

    def close(self) -> None:
        """Close the connection. Idempotent; never raises."""


class LedgerDatabase(Protocol):
    """Where a ledger is."""

    @property
    def name(self) -> str:
        """What people call it; holds no secret."""

    @property
    def journal_dir(self) -> Path:
        """This machine's folder for what was accepted and may not be in the database yet."""

    @property
    def patience_s(self) -> float:
        """How long one operation may take before it fails."""

    @property
    def may_be_away(self) -> bool:
        """Whether a ledger starts all the same when this cannot be reached: a server comes back, a file does not."""

    def open(self) -> LedgerSession:
        """Connect for writing; creates or migrates the tables where that is the policy.

        Raises ``LedgerUnavailable`` when it cannot be reached now, ``LedgerError`` when it never will be a ledger.
        """

    def version(self) -> str | None:
        """Return the schema's version, ``None`` where there are no tables yet. Raises ``LedgerError``."""

    def migrate(self, grant_to: str | None = None) -> tuple[str | None, str]:
        """Bring the schema up whatever the policy; return the version before and after.

        ``grant_to``: a role of the server that gateways run as, and that may do no more than they need.
        """

    def open_readonly(self) -> LedgerSession:
        """Connect for reading; the session may be used by several threads in turn. Raises as ``open``."""


Place = Path | LedgerDatabase
"""A ledger: a database, or the path of an SQLite file."""


def database_at(place: Place) -> LedgerDatabase:
    """Return the database of a place."""
    if isinstance(place, Path):
        from billing.database_sqlite import SqliteDatabase

        return SqliteDatabase(place)
    return place
