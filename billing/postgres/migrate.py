"""Bringing the tables in PostgreSQL to this version's schema, with Alembic, one process at a time."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from billing.errors import LedgerError

VERSION_TABLE = "ledger_version"
_LOCK = 0x6B776C67_6D696772  # "kwlgmigr"

#: What a gateway needs, and nothing that could change a row. Triggers refuse the rest to the tables' owner as well.
_GRANTS = (
    "GRANT USAGE ON SCHEMA {schema} TO {role}",
    "GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}",
    "GRANT INSERT ON requests, request_ids, prices, refused, closings, removals TO {role}",
    "GRANT INSERT, UPDATE ON rollup_keys, rollups, day_rollups, value_rollups, rolled TO {role}",
    "GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
    "GRANT EXECUTE ON FUNCTION make_ledger_month(BIGINT), drop_ledger_months(BIGINT) TO {role}",
    "ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT SELECT ON TABLES TO {role}",
)


def newest() -> str:
    """Return the schema version that this code knows."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def version_of(connection: Connection) -> str | None:
    """Return the schema version of a database, ``None`` when it holds no ledger."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def migrate(connection: Connection) -> tuple[str | None, str]:
    """Bring the schema up, in one transaction; return the version before and after. Raises ``LedgerError``.

    Takes a lock, so that of several gateways that start at once one does it and the others wait.
    """
    try:
        with connection.begin():
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            before = version_of(connection)
            if before is not None and before not in _known():
                raise LedgerError(f"the ledger has schema {before}, this version knows schema {newest()}")
            config = _config()
            config.attributes["connection"] = connection
            config.attributes["schema"] = None
            command.upgrade(config, "head")
            return before, newest()
    except DBAPIError as error:
        raise LedgerError(f"the ledger's tables cannot be made: {error.orig}") from error


def grant(connection: Connection, role: str) -> None:
    """Let a role run gateways: read, insert, sum, close; change and delete nothing. Raises ``LedgerError``."""
    quote = connection.dialect.identifier_preparer.quote
    try:
        with connection.begin():
            schema = connection.execute(text("SELECT current_schema()")).scalar_one()
            for statement in _GRANTS:
                connection.execute(text(statement.format(schema=quote(schema), role=quote(role))))
    except DBAPIError as error:
        raise LedgerError(f"{role} could not be granted what a gateway needs: {error.orig}") from error


def _known() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "billing.postgres:migrations")
    config.set_main_option("path_separator", "os")
    return config
