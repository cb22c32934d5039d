"""What contract suites run over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.samples.postgres import Server
from tracing.store_database import Place, TraceDatabase, database_at


@pytest.fixture(params=["sqlite", "postgresql"])
def trace_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Return where a trace store may be that is not there yet, in each kind of database; it can be opened again."""
    if request.param == "sqlite":
        yield tmp_path / "traces.sqlite3"
        return
    server: Server = request.getfixturevalue("postgres")
    database: TraceDatabase = database_at(server.database())
    yield database
    database.close()
