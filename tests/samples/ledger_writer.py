"""A process that writes to a ledger and tells each row that was accepted, so that a test can kill it.

``python -m tests.samples.ledger_writer PLACE FIRST COUNT [STEP]``; the place is a path, or a URL and a journal folder
with a space between. With a step it kills itself there, in the middle of the write path; without one it goes on until
it is killed or done. The step ``admitting``: each request is admitted, and those with an odd number get their row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from billing.database import Place
from billing.database_sqlite import SqliteDatabase, SqliteSession
from billing.journal import Orphan, Segment
from billing.ledger import Ledger, LedgerOptions
from billing.postgres.database import PostgresDatabase, PostgresSession, postgres_database
from billing.prices import PriceBook
from tests.samples.billed import billed, died_in_flight
from tests.samples.kill_points import die, journaled, torn, watch

OPTIONS = LedgerOptions(commit_window_s=0.002, segment_bytes=4096, adopt_interval_s=0.05)


def _at_statement(start: str) -> None:
    """Die when the writer is about to run a statement, in a file or in a server; also before the ledger has started."""
    opened = SqliteDatabase.open, PostgresDatabase.open

    def file(self: SqliteDatabase) -> SqliteSession:
        session = opened[0](self)
        watch(session, start)
        return session

    def server(self: PostgresDatabase) -> PostgresSession:
        session = opened[1](self)
        watch(session, start)
        return session

    SqliteDatabase.open = file  # type: ignore[method-assign]
    PostgresDatabase.open = server  # type: ignore[method-assign]


STEPS: dict[str, Callable[[], None]] = {
    "torn": lambda: torn(5),
    "journaled": lambda: journaled(5),
    "begin": lambda: _at_statement("BEGIN"),
    "insert": lambda: _at_statement("INSERT"),
    "commit": lambda: _at_statement("COMMIT"),
    "committed": lambda: setattr(Ledger, "_succeeded", die),
    "sealed": lambda: setattr(Segment, "remove", die),
    "adopted": lambda: setattr(Orphan, "remove", die),
}


def main(place: Place, first: int, count: int, step: str | None, *, admits: bool = False) -> None:
    """Append the rows and tell each on standard output once it is accepted."""
    book = PriceBook.default()
    if step is None or step not in ("begin", "insert", "commit"):
        Ledger(place, OPTIONS).register(book)
    ledger = Ledger(place, OPTIONS)
    if step in ("begin", "insert", "commit", "adopted"):
        STEPS[step]()
    ledger.start()
    if step is not None:
        STEPS[step]()
    os.write(1, b"ready\n")
    for number in range(first, first + count):
        if admits:
            ledger.admit(died_in_flight(number, book))
        if not admits or number % 2:
            ledger.append(billed(number, book))
        os.write(1, b"%d\n" % number)
    ledger.close()
    os.write(1, b"closed\n")


if __name__ == "__main__":
    word = sys.argv[4] if len(sys.argv) > 4 else None
    admitting = word == "admitting"
    url, _, folder = sys.argv[1].partition(" ")
    where = postgres_database(url, Path(folder)) if folder else Path(url)
    main(where, int(sys.argv[2]), int(sys.argv[3]), None if admitting else word, admits=admitting)
