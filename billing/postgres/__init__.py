"""The ledger in PostgreSQL. Nothing here is imported unless a ledger's URL says so: it needs the extra ``postgres``."""
