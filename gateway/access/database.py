"""What the store of keys needs of a database, and the tables that it has in both kinds of it.

SQL is written once, with named parameters, in what SQLite and PostgreSQL have in common. Tables are few and small; a
version in ``access_state`` grows with every change, so that whoever keeps a copy can ask cheaply whether it is old.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gateway.access.errors import AccessError, AccessUnavailable

Parameters = Mapping[str, str | int | None]
Line = tuple[Any, ...]

TABLES = (
    "CREATE TABLE IF NOT EXISTS access_state (id INTEGER PRIMARY KEY, version BIGINT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS access_tenants (
  name TEXT PRIMARY KEY, models TEXT, disabled INTEGER NOT NULL DEFAULT 0, created_ns BIGINT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS access_teams (
  tenant TEXT NOT NULL, name TEXT NOT NULL, models TEXT, disabled INTEGER NOT NULL DEFAULT 0,
  created_ns BIGINT NOT NULL, PRIMARY KEY (tenant, name))""",
    """CREATE TABLE IF NOT EXISTS access_keys (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, team TEXT NOT NULL, roles TEXT NOT NULL, models TEXT, shows TEXT,
  note TEXT NOT NULL, created_ns BIGINT NOT NULL, expires_ns BIGINT, revoked_ns BIGINT)""",
    """CREATE TABLE IF NOT EXISTS access_secrets (
  digest TEXT PRIMARY KEY, key_id TEXT NOT NULL, prefix TEXT NOT NULL, created_ns BIGINT NOT NULL,
  expires_ns BIGINT)""",
    "CREATE INDEX IF NOT EXISTS access_secrets_by_key ON access_secrets (key_id)",
    """CREATE TABLE IF NOT EXISTS access_repairs (
  key_id TEXT NOT NULL, policy TEXT NOT NULL, PRIMARY KEY (key_id, policy))""",
    """CREATE TABLE IF NOT EXISTS access_aliases (
  level TEXT NOT NULL, subject TEXT NOT NULL, name TEXT NOT NULL, model TEXT NOT NULL,
  PRIMARY KEY (level, subject, name))""",
    """CREATE TABLE IF NOT EXISTS access_limits (
  level TEXT NOT NULL, subject TEXT NOT NULL, kind TEXT NOT NULL, period TEXT NOT NULL, amount BIGINT NOT NULL,
  on_outage TEXT NOT NULL, PRIMARY KEY (level, subject, kind, period))""",
    """CREATE TABLE IF NOT EXISTS access_audit (
  seq {serial}, at_ns BIGINT NOT NULL, actor TEXT NOT NULL, source TEXT NOT NULL, action TEXT NOT NULL,
  subject TEXT NOT NULL, detail TEXT NOT NULL)""",
    "INSERT INTO access_state (id, version) VALUES (1, 0) ON CONFLICT DO NOTHING",
)

BUSY_TIMEOUT_S = 5.0
_APPEND_ONLY = tuple(
    f"CREATE TRIGGER IF NOT EXISTS access_audit_no_{what.lower()} BEFORE {what} ON access_audit "
    "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
    for what in ("UPDATE", "DELETE")
)


class AccessSession(Protocol):
    """One connection, used by one thread at a time. Every method raises ``AccessError``."""

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines of a query; parameters are named ``:name``."""

    def execute(self, sql: str, parameters: Parameters | None = None) -> int:
        """Run a statement within ``writing``; return how many lines it concerned."""

    def reading(self) -> AbstractContextManager[None]:
        """Within the block all queries see one state."""

    def writing(self) -> AbstractContextManager[None]:
        """Be the only writer within the block: committed at its end, rolled back by an error."""

    def close(self) -> None:
        """Close the connection. Never raises."""


class AccessDatabase(Protocol):
    """Where keys are stored."""

    @property
    def name(self) -> str:
        """What people call it; holds no secret."""

    def open(self) -> AccessSession:
        """Connect; absent tables are made. Raises ``AccessError``."""


@dataclass(frozen=True, slots=True)
class SqliteAccess:
    """A file on this machine, for every process of it."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def open(self) -> SqliteSession:
        """Connect."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise AccessError(f"the store of keys {self.path}: {why}") from error
        session = SqliteSession(connection, self.name)
        try:
            with session.told():
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
            with session.writing():
                for statement in (*TABLES, *_APPEND_ONLY):
                    session.execute(statement.format(serial="INTEGER PRIMARY KEY AUTOINCREMENT"))
        except AccessError:
            session.close()
            raise
        self.path.chmod(0o600)
        return session


class SqliteSession:
    """One connection to the file."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self._name = connection, name

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines."""
        with self.told():
            return self._connection.execute(sql, parameters or {}).fetchall()

    def execute(self, sql: str, parameters: Parameters | None = None) -> int:
        """Run a statement."""
        with self.told():
            return self._connection.execute(sql, parameters or {}).rowcount

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold one snapshot of the file."""
        self.query("BEGIN")
        try:
            yield
        finally:
            self.query("COMMIT")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file's write lock."""
        self.query("BEGIN IMMEDIATE")
        try:
            yield
            self.query("COMMIT")
        finally:
            if self._connection.in_transaction:
                self.query("ROLLBACK")

    def close(self) -> None:
        """Close it."""
        self._connection.close()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn the module's errors into the store's."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise AccessUnavailable(f"the store of keys {self._name}: {error}") from error
        except sqlite3.Error as error:
            raise AccessError(f"the store of keys {self._name}: {error}") from error
