"""Alembic's way in: the connection, and its transaction, are the caller's."""

from __future__ import annotations

from alembic import context

from billing.postgres.migrate import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    version_table_schema=context.config.attributes["schema"],
)
context.run_migrations()
