"""The store of keys in PostgreSQL, beside the ledger: for a fleet of gateways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from sqlalchemy import URL, Connection, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from gateway.access.database import TABLES, Line, Parameters
from gateway.access.errors import AccessError, AccessUnavailable
from tracing.postgres.faults import faults_told

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 10
_LOCK = 0x6B776163_63657373  # "kwaccess"
_TRIGGERS = (
    "CREATE OR REPLACE FUNCTION access_audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$",
    "CREATE OR REPLACE TRIGGER access_audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON access_audit"
    " FOR EACH STATEMENT EXECUTE FUNCTION access_audit_is_append_only()",
)
_GRANTS = (
    "GRANT SELECT, INSERT, UPDATE, DELETE ON access_state, access_tenants, access_teams, access_keys, access_secrets,"
    " access_repairs, access_aliases, access_limits TO {role}",
    "GRANT SELECT, INSERT ON access_audit TO {role}",
)


@dataclass(frozen=True, slots=True)
class PostgresAccess:
    """A database behind a URL. ``makes_tables``: opening it makes those that are absent."""

    url: URL
    makes_tables: bool = True

    @property
    def name(self) -> str:
        """The URL less its password."""
        return self.url.render_as_string(hide_password=True)

    def open(self) -> PostgresSession:
        """Connect."""
        session = PostgresSession(_connect(self.url, self.name), self.name)
        try:
            if not session.query("SELECT to_regclass('access_repairs') IS NOT NULL")[0][0]:
                if not self.makes_tables:
                    raise AccessError(f"{self.name} has no tables for keys: 'keepwarm ledger migrate' makes them")
                _make(session)
        except AccessError:
            session.close()
            raise
        return session

    def migrate(self, grant_to: str | None = None) -> None:
        """Make what is absent; ``grant_to``: a role that gateways run as, which may not change the audit log."""
        connection = _connect(self.url, self.name)
        session = PostgresSession(connection, self.name)
        try:
            _make(session)
            if grant_to is not None:
                quoted = connection.dialect.identifier_preparer.quote(grant_to)
                with session.writing():
                    for statement in _GRANTS:
                        session.execute(statement.format(role=quoted))
        finally:
            session.close()


def postgres_access(url: str, *, makes_tables: bool = True) -> PostgresAccess:
    """Return the store of a URL. Raises ``AccessError`` when it is none."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise AccessError("the URL is none: write postgresql+psycopg://USER@HOST/DATABASE") from None
    return PostgresAccess(parsed.set(drivername="postgresql+psycopg"), makes_tables)


def _connect(url: URL, name: str) -> Connection:
    options = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "keepwarm"}
    with _told(name):
        connection = create_engine(url, poolclass=NullPool, connect_args=options).connect()
        with connection.begin():
            connection.execute(text(f"SET statement_timeout = '{STATEMENT_TIMEOUT_S}s'"))
        return connection


def _make(session: PostgresSession) -> None:
    with session.writing():
        session.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        for statement in TABLES:
            session.execute(statement.format(serial="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"))
        for statement in _TRIGGERS:
            session.execute(statement)


class PostgresSession:
    """One connection; each query outside a block is a transaction of its own."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._name = connection, name

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines."""
        with _told(self._name):
            if self._connection.in_transaction():
                return [tuple(line) for line in self._connection.execute(text(sql), parameters or {})]
            with self._connection.begin():
                return [tuple(line) for line in self._connection.execute(text(sql), parameters or {})]

    def execute(self, sql: str, parameters: Parameters | None = None) -> int:
        """Run a statement."""
        with _told(self._name):
            return self._connection.execute(text(sql), parameters or {}).rowcount

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold one snapshot."""
        with _told(self._name), self._connection.begin():
            self._connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the state's one row, which every change takes first."""
        with _told(self._name), self._connection.begin():
            yield

    def close(self) -> None:
        """Close it; one that is broken is dropped."""
        try:
            self._connection.close()
        except SQLAlchemyError:
            self._connection.invalidate()


def _told(name: str) -> AbstractContextManager[None]:
    return faults_told(f"the store of keys {name}", wrong=AccessError, away=AccessUnavailable)
