"""A ledger in one SQLite file: sessions over ``billing.schema``."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from billing import schema
from billing.database import Line, Parameters, Values
from billing.errors import LedgerError, LedgerUnavailable, RowsRefused
from billing.row import columns

_FETCH_LINES = 1000
_REMOVED_AT_A_TIME = 20_000
_IDS_AT_A_TIME = 500

#: What SQLite and its Python module raise for a row that no retry makes storable.
_CANNOT_HOLD = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, OverflowError)


@dataclass(frozen=True, slots=True)
class SqliteDatabase:
    """A ledger at a path; its journals lie beside it."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def journal_dir(self) -> Path:
        """The folder beside it."""
        return self.path.with_name(self.path.name + ".journal")

    @property
    def patience_s(self) -> float:
        """How long a lock is waited for."""
        return schema.BUSY_TIMEOUT_S

    @property
    def may_be_away(self) -> bool:
        """A file that cannot be opened is an error."""
        return False

    def open(self) -> SqliteSession:
        """Connect for writing; an absent file is created, an older schema brought up."""
        return SqliteSession(schema.connect(self.path), self.name)

    def version(self) -> str | None:
        """Opening it tells that it is this version's."""
        if not self.path.exists():
            return None
        self.open_readonly().close()
        return str(schema.SCHEMA_VERSION)

    def migrate(self, grant_to: str | None = None) -> tuple[str | None, str]:
        """Opening it for writing does it; a file has no roles."""
        self.open().close()
        return None, str(schema.SCHEMA_VERSION)

    def open_readonly(self) -> SqliteSession:
        """Connect to a file that is there."""
        return SqliteSession(schema.connect_readonly(self.path, check_same_thread=False), self.name)


class SqliteSession:
    """One connection in autocommit mode; transactions are begun by hand."""

    labels_sql = "json_each({table}.labels) label"

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self._name = connection, name

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines."""
        with self._told():
            return self._connection.execute(sql, parameters or {}).fetchall()

    def stream(self, sql: str, parameters: Parameters | None = None) -> Iterator[Line]:
        """Go through the lines, some at a time."""
        with self._told():
            cursor = self._connection.execute(sql, parameters or {})
            while batch := cursor.fetchmany(_FETCH_LINES):
                yield from batch

    def execute(self, sql: str, parameters: Parameters | None = None) -> int:
        """Run a statement."""
        with self._told():
            return self._connection.execute(sql, parameters or {}).rowcount

    def insert_rows(self, rows: Sequence[Values]) -> int:
        """Insert in large statements, which keep the interpreter free for requests meanwhile."""
        with self._told():
            self._connection.execute("SAVEPOINT rows")
            try:
                return schema.insert(self._connection, rows)
            except _CANNOT_HOLD as error:
                self._connection.execute("ROLLBACK TO rows")
                raise RowsRefused(str(error)) from error
            finally:
                if self._connection.in_transaction:  # a full disk may have ended it
                    self._connection.execute("RELEASE rows")

    def rows_of(self, request_ids: Sequence[str]) -> list[Values]:
        """Look them up by the unique index."""
        found: list[Values] = []
        with self._told():
            for at in range(0, len(request_ids), _IDS_AT_A_TIME):
                some = request_ids[at : at + _IDS_AT_A_TIME]
                marks = ", ".join("?" * len(some))
                found += self._connection.execute(
                    f"SELECT {', '.join(columns())} FROM requests WHERE request_id IN ({marks})", some
                )
        return found

    def remove_rows(self, before_ns: int) -> int:
        """Delete some thousands in each transaction, so that writers get their turn."""
        removed = 0
        while True:
            with self.writing():
                some = self.execute(
                    "DELETE FROM requests WHERE seq IN"
                    " (SELECT seq FROM requests WHERE posted_ns < :before LIMIT :limit)",
                    {"before": before_ns, "limit": _REMOVED_AT_A_TIME},
                )
            removed += some
            if some < _REMOVED_AT_A_TIME:
                return removed

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold one snapshot."""
        with self._told():
            self._connection.execute("BEGIN")
        try:
            yield
        finally:
            with self._told():
                self._connection.execute("COMMIT")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file's one write lock."""
        with self._told():
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._told():
                self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                with self._told():
                    self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def on_statement(self, call: Callable[[str], object]) -> None:
        """Call a function with each statement before it runs: for tests that break one."""
        self._connection.set_trace_callback(call)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn the module's errors into the ledger's."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LedgerUnavailable(f"ledger {self._name}: {error}") from error
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self._name}: {error}") from error
