"""A ledger in PostgreSQL: sessions through SQLAlchemy Core.

Every group commit takes one lock in the database, for its insert and commit alone: so gateways write one after another,
sequence numbers are committed in order, and what folds, counts or closes sees no gap that fills later. Rows travel as
one array for each column, in one statement, and nothing is kept in the server's session, so that a pooler may stand
between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

from sqlalchemy import URL, Connection, Engine, TextClause, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from billing.database import Line, Parameters, Values
from billing.errors import LedgerError, LedgerUnavailable, RowsRefused
from billing.postgres.migrate import grant, migrate, newest, version_of
from billing.row import LedgerRow, SqlValue, columns
from tracing.postgres.faults import faults_told

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 30
_FETCH_LINES = 1000
_WRITER_LOCK = 0x6B776C67_77726974  # "kwlgwrit"
_LOCK = text("SELECT pg_advisory_xact_lock(:key)").bindparams(key=_WRITER_LOCK)
_MAKE_MONTH = text("SELECT make_ledger_month(:at)")
_TYPES = {"int": "bigint", "int | None": "bigint", "str": "text", "str | None": "text"}
_POSTED = columns().index("posted_ns")


@dataclass(frozen=True, slots=True)
class PostgresDatabase:
    """A ledger behind a URL (``postgresql+psycopg://…``); rows that wait for it lie in ``journal_dir``.

    ``migrates``: opening it for writing brings its schema up; else an old one is an error that says so.
    """

    url: URL
    journal_dir: Path
    migrates: bool = True
    _engines: list[Engine] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The URL less its password."""
        return self.url.render_as_string(hide_password=True)

    @property
    def patience_s(self) -> float:
        """The limits of one statement and of the connection before it."""
        return CONNECT_TIMEOUT_S + STATEMENT_TIMEOUT_S

    @property
    def may_be_away(self) -> bool:
        """Servers come back."""
        return True

    def open(self) -> PostgresSession:
        """Connect for writing."""
        connection = self._connect(isolation="READ COMMITTED", read_only=False)
        try:
            if self.migrates and self._version(connection) != newest():
                migrate(connection)
            self._check(connection)
        except LedgerError:
            connection.close()
            raise
        return PostgresSession(connection, self.name)

    def open_readonly(self) -> PostgresSession:
        """Connect for reading; each transaction sees one state."""
        connection = self._connect(isolation="REPEATABLE READ", read_only=True)
        try:
            self._check(connection)
        except LedgerError:
            connection.close()
            raise
        return PostgresSession(connection, self.name)

    def version(self) -> str | None:
        """Ask for it."""
        connection = self._connect(isolation="REPEATABLE READ", read_only=True)
        try:
            return self._version(connection)
        finally:
            connection.close()

    def migrate(self, grant_to: str | None = None) -> tuple[str | None, str]:
        """Bring the schema up; return the version before and after. ``grant_to``: a role that gateways run as."""
        connection = self._connect(isolation="READ COMMITTED", read_only=False)
        try:
            versions = migrate(connection)
            if grant_to is not None:
                grant(connection, grant_to)
            return versions
        finally:
            connection.close()

    def _connect(self, *, isolation: Literal["READ COMMITTED", "REPEATABLE READ"], read_only: bool) -> Connection:
        with _told(self.name):
            connection = self._engine().connect().execution_options(isolation_level=isolation)
            try:
                with connection.begin():
                    connection.execute(text(f"SET statement_timeout = '{STATEMENT_TIMEOUT_S}s'"))
                    if read_only:
                        connection.execute(text("SET default_transaction_read_only = on"))
            except DBAPIError:
                connection.close()
                raise
            return connection

    def _engine(self) -> Engine:
        """Return the engine, made when it is first needed; it holds no connections of its own."""
        if not self._engines:
            options: Mapping[str, object] = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "keepwarm"}
            self._engines.append(create_engine(self.url, poolclass=NullPool, connect_args=options))
        return self._engines[0]

    def _version(self, connection: Connection) -> str | None:
        with _told(self.name), connection.begin():
            return version_of(connection)

    def _check(self, connection: Connection) -> None:
        version = self._version(connection)
        if version is None:
            raise LedgerError(f"there is no ledger at {self.name}: 'keepwarm ledger migrate' makes its tables")
        if version != newest():
            raise LedgerError(
                f"the ledger at {self.name} has schema {version}, this version knows schema {newest()}: "
                "'keepwarm ledger migrate' brings an older one up"
            )


def postgres_database(url: str, journal_dir: Path, *, migrates: bool = True) -> PostgresDatabase:
    """Return the ledger of a URL. Raises ``LedgerError`` when it is none."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise LedgerError("the ledger's URL is none: write postgresql+psycopg://USER@HOST/DATABASE") from None
    if parsed.get_backend_name() != "postgresql":
        raise LedgerError(f"a ledger is in SQLite (a path) or PostgreSQL, not in {parsed.get_backend_name()}")
    return PostgresDatabase(parsed.set(drivername="postgresql+psycopg"), journal_dir, migrates)


class PostgresSession:
    """One connection; each query outside a block is a transaction of its own."""

    labels_sql = "LATERAL json_each_text(CAST({table}.labels AS json)) AS label(key, value)"

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._name = connection, name
        self._months: set[tuple[int, int]] = set()  # those whose partitions are there

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines."""
        with self._transaction():
            found = self._connection.execute(text(sql), _storable(parameters))
            return [tuple(line) for line in found.fetchall()]

    def stream(self, sql: str, parameters: Parameters | None = None) -> Iterator[Line]:
        """Go through a server-side cursor."""
        with self._transaction():
            options = {"stream_results": True, "yield_per": _FETCH_LINES}
            with self._connection.execute(text(sql), _storable(parameters), execution_options=options) as found:
                for line in found:
                    yield tuple(line)

    def execute(self, sql: str, parameters: Parameters | None = None) -> int:
        """Run a statement."""
        with _told(self._name):
            return self._connection.execute(text(sql), _storable(parameters)).rowcount

    def insert_rows(self, rows: Sequence[Values]) -> int:
        """Insert ids, then the rows of those that were new."""
        if not rows:
            return 0
        once: dict[Values, Values] = {}  # the first of each id, in order
        for values in rows:
            once.setdefault(values[:2], values)
        self._make_months(once.values())
        arrays = {
            name: _array(column) for name, column in zip(columns(), zip(*once.values(), strict=True), strict=True)
        }
        with _told(self._name):
            savepoint = self._connection.begin_nested()
            try:
                inserted: int = self._connection.execute(_insert(), arrays).rowcount
            except (DataError, IntegrityError) as error:
                savepoint.rollback()
                raise RowsRefused(str(error.orig)) from error
            savepoint.commit()
            return inserted

    def _make_months(self, rows: Iterable[Values]) -> None:
        """See to it that every row has its month's partition."""
        for posted_ns in {int(str(values[_POSTED])) for values in rows}:
            try:
                day = datetime.fromtimestamp(posted_ns // 10**9, UTC)
            except (ValueError, OverflowError):
                continue  # the table will refuse it
            if (day.year, day.month) not in self._months:
                with _told(self._name):
                    self._connection.execute(_MAKE_MONTH, {"at": posted_ns})
                self._months.add((day.year, day.month))

    def rows_of(self, request_ids: Sequence[str]) -> list[Values]:
        """Look them up by index."""
        sql = f"SELECT {', '.join(columns())} FROM requests WHERE request_id = ANY(:ids)"
        with self._transaction():
            found = self._connection.execute(text(sql), {"ids": list(request_ids)})
            return [tuple(line) for line in found]

    def remove_rows(self, before_ns: int) -> int:
        """Drop the months; takes no longer for full ones."""
        with self.writing():
            self.execute("SET LOCAL statement_timeout = 0")
            return int(self.query("SELECT drop_ledger_months(:before)", {"before": before_ns})[0][0])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold one snapshot."""
        with _told(self._name), self._connection.begin():
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the ledger's one writer's lock."""
        with _told(self._name), self._connection.begin():
            self._connection.execute(_LOCK)
            try:
                yield
            except BaseException:
                self._months.clear()  # those made in this transaction are gone with it
                raise

    def close(self) -> None:
        """Close the connection; one that is broken is dropped."""
        try:
            self._connection.close()
        except SQLAlchemyError:
            self._connection.invalidate()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _told(self._name):
            if self._connection.in_transaction():
                yield
            else:
                with self._connection.begin():
                    yield


@cache
def _insert() -> TextClause:
    """Return the statement that inserts rows, given as an array for each column, whose ids are not there yet."""
    types = LedgerRow.__annotations__
    arrays = ", ".join(f"CAST(:{name} AS {_TYPES[str(types[name])]}[])" for name in columns())
    names = ", ".join(columns())
    return text(f"""
WITH given AS MATERIALIZED (SELECT * FROM unnest({arrays}) WITH ORDINALITY AS given({names}, place)),
  fresh AS (
    INSERT INTO request_ids (request_id, revision, posted_ns) SELECT request_id, revision, posted_ns FROM given
    ON CONFLICT DO NOTHING RETURNING request_id, revision
  )
INSERT INTO requests ({names})
SELECT {", ".join(f"given.{name}" for name in columns())} FROM given JOIN fresh USING (request_id, revision)
ORDER BY place
""")


def _array(column: Sequence[SqlValue]) -> str:
    """Write a column as PostgreSQL writes an array. The driver would, with a regular expression for each text.

    What its texts cannot hold is replaced, also where JSON writes it as an escape.
    """
    if all(value is None or isinstance(value, int) for value in column):
        return f"{{{','.join(['NULL' if value is None else str(value) for value in column])}}}"
    return f"{{{','.join(['NULL' if value is None else _quoted(str(value)) for value in column])}}}"


def _quoted(value: str) -> str:
    if "\0" in value or "\\u0000" in value:
        value = value.replace("\0", "\ufffd").replace("\\u0000", "\\ufffd")
    if "\\" in value or '"' in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'


def _storable(parameters: Parameters | None) -> dict[str, str | int | bytes | None]:
    return {
        name: value.replace("\0", "\ufffd") if isinstance(value, str) else value
        for name, value in (parameters or {}).items()
    }


def _told(name: str) -> AbstractContextManager[None]:
    return faults_told(f"ledger {name}", wrong=LedgerError, away=LedgerUnavailable)
