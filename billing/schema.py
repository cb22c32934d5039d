"""The ledger's tables in SQLite, and connections to them.

WAL with ``synchronous=FULL``: every commit is synced, so after a power failure at most the group that was being written
is missing. Triggers keep the tables append-only.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, product
from pathlib import Path

from billing.errors import LedgerError, LedgerUnavailable
from billing.rollup import KEY_COLUMNS, SUM_COLUMNS
from billing.row import LedgerRow, SqlValue, columns

#: "kwlg": tells a ledger from any other SQLite file.
APPLICATION_ID = 0x6B776C67
SCHEMA_VERSION = 3
BUSY_TIMEOUT_S = 5.0

_TYPES = {"int": "INTEGER NOT NULL", "int | None": "INTEGER", "str": "TEXT NOT NULL", "str | None": "TEXT"}


def _columns_sql() -> str:
    types = LedgerRow.__annotations__
    return ",\n  ".join(f"{name} {_TYPES[str(types[name])]}" for name in columns())


_VALUES = f"""
CREATE TABLE value_rollups (
  day INTEGER NOT NULL,
  dimension TEXT NOT NULL,
  value TEXT NOT NULL,
  currency TEXT NOT NULL,
  {", ".join(f"{name} INTEGER NOT NULL" for name in SUM_COLUMNS)},
  PRIMARY KEY (dimension, day, value, currency)
) STRICT, WITHOUT ROWID;
"""
_ROLLUPS = f"""
CREATE TABLE rollup_keys (
  id INTEGER PRIMARY KEY,
  {", ".join(f"{name} TEXT NOT NULL" for name in KEY_COLUMNS)},
  UNIQUE ({", ".join(KEY_COLUMNS)})
) STRICT;
CREATE TABLE rollups (
  hour INTEGER NOT NULL,
  key_id INTEGER NOT NULL REFERENCES rollup_keys (id),
  {", ".join(f"{name} INTEGER NOT NULL" for name in SUM_COLUMNS)},
  PRIMARY KEY (hour, key_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE day_rollups (
  day INTEGER NOT NULL,
  key_id INTEGER NOT NULL REFERENCES rollup_keys (id),
  {", ".join(f"{name} INTEGER NOT NULL" for name in SUM_COLUMNS)},
  PRIMARY KEY (day, key_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE rolled (one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL) STRICT;
INSERT INTO rolled VALUES (1, 0);
"""
_CLOSINGS = """
CREATE TABLE closings (
  until_ns INTEGER PRIMARY KEY,
  closed_ns INTEGER NOT NULL,
  totals TEXT NOT NULL
) STRICT;
CREATE TRIGGER requests_closed_period BEFORE INSERT ON requests
WHEN NEW.posted_ns < (SELECT ifnull(max(until_ns), -9223372036854775808) FROM closings)
BEGIN SELECT RAISE(ABORT, 'the period is closed'); END;
"""
_REMOVALS = """
CREATE TABLE removals (
  before_ns INTEGER PRIMARY KEY,
  removed_ns INTEGER NOT NULL,
  totals TEXT NOT NULL
) STRICT;
CREATE TRIGGER removals_of_closed_periods BEFORE INSERT ON removals
WHEN NEW.before_ns > (SELECT ifnull(max(until_ns), -9223372036854775808) FROM closings)
BEGIN SELECT RAISE(ABORT, 'the period is not closed'); END;
CREATE TRIGGER requests_no_DELETE BEFORE DELETE ON requests
WHEN OLD.posted_ns >= (SELECT ifnull(max(before_ns), -9223372036854775808) FROM removals)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""

_TABLES = f"""
CREATE TABLE prices (
  version TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  currency TEXT NOT NULL,
  body TEXT NOT NULL
) STRICT;
CREATE TABLE requests (
  seq INTEGER PRIMARY KEY,
  {_columns_sql()},
  UNIQUE (request_id, revision),
  CHECK ((amount_nano IS NULL) = (unpriced_reason IS NOT NULL))
) STRICT;
CREATE INDEX requests_posted ON requests (posted_ns);
CREATE INDEX requests_corrected ON requests (request_id) WHERE revision > 0;
CREATE INDEX requests_run ON requests (run_id, step) WHERE run_id IS NOT NULL;
CREATE TABLE refused (
  seq INTEGER PRIMARY KEY,
  request_id TEXT NOT NULL,
  reason TEXT NOT NULL,
  payload BLOB NOT NULL
) STRICT;
{_ROLLUPS}
{_VALUES}
{_CLOSINGS}
{_REMOVALS}
"""
_TRIGGER = """
CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table}
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""

#: What is never allowed; what retention removes of ``requests`` has a trigger of its own.
_GUARDED = (("requests", "UPDATE"), *product(("prices", "closings", "removals"), ("UPDATE", "DELETE")))

#: How many rows one INSERT statement takes, largest first. While a statement runs the interpreter is free for requests;
#: row by row the writer would take it back before another thread is awake, and hold it for up to 5 ms at a time.
CHUNK_ROWS = (128, 16, 1)


@cache
def insert_sql(rows: int) -> str:
    """Return the statement that inserts so many rows and leaves those whose id is there already."""
    row = f"({', '.join('?' * len(columns()))})"
    values = ", ".join([row] * rows)
    return (
        f"INSERT INTO requests ({', '.join(columns())}) VALUES {values} ON CONFLICT (request_id, revision) DO NOTHING"
    )


def insert(connection: sqlite3.Connection, rows: Sequence[tuple[SqlValue, ...]]) -> int:
    """Insert rows; return how many were new. Raises ``sqlite3.Error``, ``OverflowError``: for all of them together."""
    new = at = 0
    for chunk in CHUNK_ROWS:
        while len(rows) - at >= chunk:
            values = tuple(chain.from_iterable(rows[at : at + chunk]))
            new += connection.execute(insert_sql(chunk), values).rowcount
            at += chunk
    return new


def connect(path: Path) -> sqlite3.Connection:
    """Open the ledger for writing and create it if there is none. Raises ``LedgerError``.

    The connection is in autocommit mode: transactions are begun by hand.
    """
    try:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            with _one_at_a_time(path.parent):  # the change to WAL does not wait for others, it fails
                if _is_empty(connection):
                    connection.execute("PRAGMA journal_mode = WAL")
                    _create(connection)
                elif _version(connection) in _MIGRATIONS:
                    _migrate(connection)
            _check(connection, path)
            connection.execute("PRAGMA synchronous = FULL")
        except (sqlite3.Error, LedgerError):
            connection.close()
            raise
    except sqlite3.OperationalError as error:
        raise LedgerUnavailable(f"ledger {path} cannot be opened: {error}") from error
    except sqlite3.Error as error:
        raise LedgerError(f"ledger {path} cannot be opened: {error}") from error
    return connection


def connect_readonly(path: Path, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open an existing ledger for reading. Raises ``LedgerError``."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}")
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        connection = sqlite3.connect(
            uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=check_same_thread
        )
        try:
            _check(connection, path)
        except (sqlite3.Error, LedgerError):
            connection.close()
            raise
    except sqlite3.Error as error:
        raise LedgerError(f"ledger {path} cannot be read: {error}") from error
    return connection


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep other processes that create a ledger in the folder waiting."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        script = _TABLES + "".join(_TRIGGER.format(table=table, verb=verb) for table, verb in _GUARDED)
        for statement in _statements(script):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


_FROM_1 = f"""
DROP TRIGGER requests_no_UPDATE;
ALTER TABLE requests ADD COLUMN posted_ns INTEGER NOT NULL DEFAULT 0;
ALTER TABLE requests ADD COLUMN settles_unpriced INTEGER NOT NULL DEFAULT 0;
UPDATE requests SET posted_ns = arrived_ns;
DROP INDEX requests_arrived;
CREATE INDEX requests_posted ON requests (posted_ns);
CREATE INDEX requests_corrected ON requests (request_id) WHERE revision > 0;
{_ROLLUPS}
{_CLOSINGS}
{_TRIGGER.format(table="requests", verb="UPDATE")}
{_TRIGGER.format(table="closings", verb="UPDATE")}
{_TRIGGER.format(table="closings", verb="DELETE")}
"""


_FROM_2 = f"""
DROP TRIGGER IF EXISTS requests_no_DELETE;
{_VALUES}
{_REMOVALS}
{_TRIGGER.format(table="removals", verb="UPDATE")}
{_TRIGGER.format(table="removals", verb="DELETE")}
DELETE FROM rollups;
DELETE FROM day_rollups;
UPDATE rolled SET seq = 0;
"""
#: From a version to the next. The rollups are made anew by ``advance``: reports read rows until that is done.
_MIGRATIONS = {1: _FROM_1, 2: _FROM_2}


def _migrate(connection: sqlite3.Connection) -> None:
    """Bring a ledger of an older schema to this one, in one transaction."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        while (version := _version(connection)) in _MIGRATIONS:
            for statement in _statements(_MIGRATIONS[version]):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _statements(script: str) -> list[str]:
    """Split a script into whole statements; ``executescript`` would commit our transaction."""
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements


def _check(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise LedgerError(f"{path} is an SQLite file, but no keepwarm ledger")
    if version != SCHEMA_VERSION:
        raise LedgerError(f"ledger {path} has schema {version}, this version knows schema {SCHEMA_VERSION}")
