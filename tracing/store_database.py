"""What the trace store needs of a database: SQLite on one machine, PostgreSQL for a fleet. The contract of both.

Everything above it (commits, retention, lists, sums) is written once, in the SQL that both have in common, with named
parameters; only how rows are inserted, how tables are made and how a transaction is begun differ. Sums are cast to
BIGINT, which both give as Python's int.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from tracing.errors import TraceStoreError

SqlValue = str | int | float | bytes | None
Parameters = Mapping[str, SqlValue]
Row = tuple[SqlValue, ...]
"""The values of one record, as ``tracing.store_schema.COLUMNS`` orders them."""
Line = tuple[Any, ...]
"""One line of a result; its types are the query's."""


class TraceSession(Protocol):
    """One transaction, for one thread."""

    def query(self, sql: str, parameters: Parameters | None = None) -> list[Line]:
        """Return all lines; parameters are named ``:name``."""

    def execute(self, sql: str, parameters: Parameters | None = None) -> None:
        """Run a statement, within ``writing``."""

    def insert(self, rows: Sequence[Row]) -> None:
        """Store records, within ``writing``, and leave those that are there already."""


class TraceDatabase(Protocol):
    """Where traces are. Every method raises ``TraceStoreUnavailable`` while it cannot be reached, else
    ``TraceStoreError``."""

    @property
    def name(self) -> str:
        """What people call it; holds no secret."""

    @property
    def may_be_away(self) -> bool:
        """Whether a store opens all the same when this cannot be reached: a server comes back, a file does not."""

    def version(self) -> int | None:
        """Return the version of the tables, ``None`` where there are none yet."""

    def prepare(self, *, read_only: bool) -> None:
        """Look whether the tables are this version's; unless ``read_only`` make them, or bring them up."""

    def reading(self) -> AbstractContextManager[TraceSession]:
        """Within the block all queries see one state. For any thread."""

    def writing(self) -> AbstractContextManager[TraceSession]:
        """Be the store's only writer within the block: committed at its end, rolled back by an error."""

    def check(self) -> None:
        """Verify what the database itself can verify of its files."""

    def close(self) -> None:
        """Let go of connections. Never raises."""


Place = Path | TraceDatabase
"""A trace store: a database, or the path of an SQLite file."""


def database_at(place: Place | str) -> TraceDatabase:
    """Return the database of a place; a text is a path or a URL. Raises ``TraceStoreError`` where it is none."""
    if isinstance(place, str):
        if "://" not in place:
            return database_at(Path(place))
        try:
            from tracing.postgres.database import postgres_traces  # the extra 'postgres'
        except ImportError as error:
            raise TraceStoreError(f"traces in PostgreSQL need the extra 'postgres': {error}") from None
        return postgres_traces(place)
    if isinstance(place, Path):
        from tracing.store_sqlite import SqliteTraces

        return SqliteTraces(place)
    return place


def listed(name: str, values: Sequence[SqlValue]) -> tuple[str, dict[str, SqlValue]]:
    """Return what stands between the brackets of an IN, and its parameters."""
    parameters = {f"{name}{at}": value for at, value in enumerate(values)}
    return ", ".join(f":{each}" for each in parameters), parameters
