"""Traces in an SQLite file: in WAL mode, so that what was committed survives ``kill -9``, and readers don't wait."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path

from tracing.errors import TraceStoreError
from tracing.store_database import Line, Parameters, Row
from tracing.store_schema import COLUMNS, LIVES, SCHEMA, SCHEMA_VERSION, SPANS

BUSY_TIMEOUT_S = 5.0
_CHUNKS = (64, 8, 1)
"""How many records one statement takes, largest first: while it runs, the interpreter is free for requests."""

_ADDED = ("team TEXT", "parent_run_id TEXT", "parent_request_id TEXT", "parent_call_id TEXT")
_READ_FROM_BODY = {
    "team": "$.identity.team",
    "parent_run_id": "$.link.parent_run_id",
    "parent_request_id": "$.link.parent_request_id",
    "parent_call_id": "$.link.parent_call_id",
}
_MIGRATIONS = {
    1: ("ALTER TABLE records ADD COLUMN detail BLOB", *SPANS),
    2: (
        *(f"ALTER TABLE records ADD COLUMN {column}" for column in _ADDED),
        "UPDATE records SET "
        + ", ".join(f"{name} = json_extract(CAST(body AS TEXT), '{path}')" for name, path in _READ_FROM_BODY.items()),
        *LIVES,
    ),
}
"""What brings the tables of a version to the next one."""
_TYPES = {
    "serial": "INTEGER PRIMARY KEY",
    "int": "INTEGER",
    "text": "TEXT",
    "bytes": "BLOB",
    "rows": " STRICT",
    "keyed": " STRICT, WITHOUT ROWID",
}


class SqliteTraces:
    """The file. One connection reads for all threads, one writes."""

    may_be_away = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def version(self) -> int | None:
        """Look into the file."""
        if not self._path.exists():
            return None
        with _told("read", self._path), sqlite3.connect(f"file:{self._path}?mode=ro", uri=True) as connection:
            return connection.execute("PRAGMA user_version").fetchone()[0] or None

    def prepare(self, *, read_only: bool) -> None:
        """Open it, made where there is none."""
        try:
            if read_only:
                if not self._path.exists():
                    raise TraceStoreError(f"there is no trace store at {self._path}")
                self._reader = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, check_same_thread=False)
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = _open_for_writing(self._path)
                self._reader = sqlite3.connect(self._path, check_same_thread=False)
            self._reader.isolation_level = None
            _verify_version(self._reader)
        except (sqlite3.Error, OSError) as error:
            raise TraceStoreError(f"can't open the trace store {self._path}: {error}") from error

    @contextmanager
    def reading(self) -> Iterator[SqliteSession]:
        """Hold one snapshot of the file."""
        with self._lock, _told("read", self._path):
            if self._reader is None:
                raise TraceStoreError(f"the trace store {self._path} is closed")
            self._reader.execute("BEGIN")
            try:
                yield SqliteSession(self._reader)
            finally:
                self._reader.rollback()

    @contextmanager
    def writing(self) -> Iterator[SqliteSession]:
        """Hold the file's write lock."""
        with _told("write", self._path):
            if self._writer is None:
                raise TraceStoreError(f"the trace store {self._path} is closed or was opened read-only")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield SqliteSession(self._writer)
                self._writer.execute("COMMIT")
            except BaseException:
                self._writer.rollback()
                raise

    def check(self) -> None:
        """Have SQLite look at every page."""
        with self.reading() as session:
            if (problem := session.query("PRAGMA quick_check")[0][0]) != "ok":
                raise TraceStoreError(f"{self._path}: {problem}")

    def close(self) -> None:
        """Close both connections."""
        with self._lock:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()
            self._reader = self._writer = None


class SqliteSession:
    """One transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines."""
        return self._connection.execute(sql, parameters or {}).fetchall()

    def execute(self, sql: str, parameters: Parameters | None = None) -> None:
        """Run a statement."""
        self._connection.execute(sql, parameters or {})

    def insert(self, rows: Sequence[Row]) -> None:
        """Insert many rows a statement."""
        at = 0
        for chunk in _CHUNKS:
            while len(rows) - at >= chunk:
                self._connection.execute(_insert_sql(chunk), tuple(chain.from_iterable(rows[at : at + chunk])))
                at += chunk


@cache
def _insert_sql(rows: int) -> str:
    row = f"(?{', ?' * COLUMNS.count(',')})"
    return f"INSERT INTO records ({COLUMNS}) VALUES {', '.join([row] * rows)} ON CONFLICT (request_id) DO NOTHING"


def _open_for_writing(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("BEGIN IMMEDIATE")  # of several processes that start at once one makes the tables
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    made = (*SCHEMA, *SPANS, *LIVES) if version == 0 else ()
    brought_up = (statement for old in range(max(version, 1), SCHEMA_VERSION) for statement in _MIGRATIONS[old])
    for statement in made or brought_up:
        connection.execute(statement.format_map(_TYPES))
    if version < SCHEMA_VERSION:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    return connection


def _verify_version(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if 0 < version < SCHEMA_VERSION:
        raise TraceStoreError(
            f"the trace store has schema {version}, which the next start of 'keepwarm serve' brings to {SCHEMA_VERSION}"
        )
    if version != SCHEMA_VERSION:
        raise TraceStoreError(f"the trace store has schema {version}, this build reads {SCHEMA_VERSION}")


@contextmanager
def _told(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise TraceStoreError(f"can't {what} the trace store {path}: {error}") from error
