"""The migrations of the ledger's tables in PostgreSQL, for Alembic; ``billing.postgres.migrate`` runs them."""
