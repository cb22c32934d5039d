"""Traces in PostgreSQL. Nothing here is imported unless a URL says so: it needs the extra ``postgres``."""
