"""Traces in PostgreSQL, for a fleet of gateways: short transactions through SQLAlchemy Core, over a small pool.

Tables are in a schema of their own, so that the database may be the ledger's. Nothing is kept in the server's session
(what a transaction needs is set in it), so a pooler may stand between. Writers take one lock in the database for each
group commit: so records are numbered in the order of their commits, and who reads on from a number misses none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

from sqlalchemy import URL, Connection, Engine, TextClause, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError

from tracing.errors import TraceStoreError, TraceStoreUnavailable
from tracing.postgres.faults import faults_told
from tracing.store_database import Line, Parameters, Row, SqlValue
from tracing.store_schema import COLUMNS, LIVES, SCHEMA, SCHEMA_VERSION, SPANS

SCHEMA_NAME = "keepwarm_traces"
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 30
_CONNECTIONS = 4  # kept; as many again for a moment
_LOCK = 0x6B777472_61636573  # "kwtraces"
_BEGIN = f"SET LOCAL search_path = {SCHEMA_NAME}; SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s'"
_BEGIN_READING = f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; {_BEGIN}"
_INSERT = (
    f"INSERT INTO records ({COLUMNS}) VALUES (%s{', %s' * COLUMNS.count(',')}) ON CONFLICT (request_id) DO NOTHING"
)
_TYPES = {
    "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "int": "BIGINT",
    "text": 'TEXT COLLATE "C"',  # the order of bytes, as Python and SQLite have it
    "bytes": "BYTEA",
    "rows": "",
    "keyed": "",
}
#: What a server that refuses a connection says when it will take it later. The driver passes the words on, no code.


class PostgresTraces:
    """A database behind a URL (``postgresql+psycopg://…``)."""

    may_be_away = True

    def __init__(self, url: URL) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._is_read_only = True
        self._is_ready = False

    @property
    def name(self) -> str:
        """The URL less its password."""
        return self._url.render_as_string(hide_password=True)

    def version(self) -> int | None:
        """The version of the tables, ``None`` where there are none."""
        with self._transaction("") as connection:
            return _version(connection)

    def prepare(self, *, read_only: bool) -> None:
        """Look at the tables, or make them. Where the server is away, that is done when it is first reached."""
        self._is_read_only = read_only
        self._ready()

    @contextmanager
    def reading(self) -> Iterator[PostgresSession]:
        """Hold one snapshot."""
        self._ready()
        with self._transaction(_BEGIN_READING) as connection:
            yield PostgresSession(connection)

    @contextmanager
    def writing(self) -> Iterator[PostgresSession]:
        """Hold the lock of the store's one writer."""
        if self._is_read_only:
            raise TraceStoreError(f"the trace store {self.name} was opened read-only")
        self._ready()
        with self._transaction(f"{_BEGIN}; SELECT pg_advisory_xact_lock({_LOCK})") as connection:
            yield PostgresSession(connection)

    def check(self) -> None:
        """The server looks after its files itself."""

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
                self._engine = None

    def _ready(self) -> None:
        if self._is_ready:
            return
        with self._transaction("" if self._is_read_only else f"SELECT pg_advisory_xact_lock({_LOCK})") as connection:
            version = _version(connection)
            if version is None and not self._is_read_only:
                _make(connection)
                version = SCHEMA_VERSION
        if version is None:
            raise TraceStoreError(f"there are no traces at {self.name}: the first 'keepwarm serve' makes the tables")
        if version != SCHEMA_VERSION:
            raise TraceStoreError(f"{self.name} has traces of schema {version}, this build knows {SCHEMA_VERSION}")
        self._is_ready = True

    @contextmanager
    def _transaction(self, first: str) -> Iterator[Connection]:
        with _told(self.name), self._connections().begin() as connection:
            if first:
                connection.exec_driver_sql(first)
            yield connection

    def _connections(self) -> Engine:
        """Return the engine, made when it is first needed."""
        with self._lock:
            if self._engine is None:
                self._engine = create_engine(
                    self._url,
                    pool_size=_CONNECTIONS,
                    max_overflow=_CONNECTIONS,
                    pool_timeout=CONNECT_TIMEOUT_S,
                    pool_pre_ping=True,
                    connect_args={
                        "connect_timeout": CONNECT_TIMEOUT_S,
                        "application_name": "keepwarm",
                        "prepare_threshold": None,  # no statements kept in the server's session
                    },
                )
            return self._engine


def postgres_traces(url: str) -> PostgresTraces:
    """Return the traces of a URL. Raises ``TraceStoreError`` when it is none."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise TraceStoreError("the URL of traces is none: write postgresql+psycopg://USER@HOST/DATABASE") from None
    if parsed.get_backend_name() != "postgresql":
        raise TraceStoreError(f"traces are in SQLite (a path) or PostgreSQL, not in {parsed.get_backend_name()}")
    return PostgresTraces(parsed.set(drivername="postgresql+psycopg"))


class PostgresSession:
    """One transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines."""
        return [tuple(line) for line in self._connection.execute(_text(sql), _storable(parameters))]

    def execute(self, sql: str, parameters: Parameters | None = None) -> None:
        """Run a statement."""
        self._connection.execute(_text(sql), _storable(parameters))

    def insert(self, rows: Sequence[Row]) -> None:
        """Send all rows in one pipeline."""
        self._connection.exec_driver_sql(_INSERT, [tuple(map(_without_nul, row)) for row in rows])


def _version(connection: Connection) -> int | None:
    is_there = connection.execute(text("SELECT to_regclass(:name)"), {"name": f"{SCHEMA_NAME}.version"}).scalar_one()
    if is_there is None:
        return None
    return int(connection.execute(text(f"SELECT version FROM {SCHEMA_NAME}.version")).scalar_one())


def _make(connection: Connection) -> None:
    connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA_NAME}; SET LOCAL search_path = {SCHEMA_NAME}")
    for statement in (*SCHEMA, *SPANS, *LIVES):
        connection.exec_driver_sql(statement.format_map(_TYPES))
    connection.exec_driver_sql(f"CREATE TABLE version AS SELECT {SCHEMA_VERSION} AS version")


@lru_cache(256)
def _text(sql: str) -> TextClause:
    return text(sql)


def _storable(parameters: Parameters | None) -> dict[str, SqlValue]:
    return {name: _without_nul(value) for name, value in (parameters or {}).items()}


def _without_nul(value: SqlValue) -> SqlValue:
    """Return what PostgreSQL's texts can hold."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _told(name: str) -> AbstractContextManager[None]:
    return faults_told(f"the trace store {name}", wrong=TraceStoreError, away=TraceStoreUnavailable)
