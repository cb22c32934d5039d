"""A process that writes to a ledger and tells each row that was accepted, so that a test can kill it.

``python -m tests.samples.ledger_writer PATH FIRST COUNT [STEP]``. With a step it kills itself there, in the middle of
the write path; without one it goes on until it is killed or done. The step ``admitting``: each request is admitted, and
those with an odd number get their row.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

from billing import journal, schema
from billing.journal import Segment
from billing.ledger import Ledger, LedgerOptions
from billing.prices import PriceBook
from tests.samples.billed import billed, died_in_flight

OPTIONS = LedgerOptions(commit_window_s=0.002, segment_bytes=4096, adopt_interval_s=0.05)


def die(*_: object) -> None:
    """End this process as an out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _torn(rows: int) -> None:
    """Die with half of a record written."""
    write, left = os.write, [rows]

    def half(fd: int, data: bytes) -> int:
        left[0] -= fd != 1
        if left[0] < 0:
            write(fd, data[: len(data) // 2])
            die()
        return write(fd, data)

    journal.os.write = half  # type: ignore[assignment]


def _journaled(rows: int) -> None:
    """Die between the journal and the queue: the row was never acknowledged."""
    append, left = Segment.append, [rows]

    def then_die(self: Segment, payload: bytes) -> None:
        append(self, payload)
        left[0] -= 1
        if left[0] < 0:
            die()

    Segment.append = then_die  # type: ignore[method-assign]


def _at_statement(start: str) -> None:
    """Die when the writer is about to run a statement."""
    connect = schema.connect

    def traced(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.set_trace_callback(lambda statement: die() if statement.startswith(start) else None)
        return connection

    schema.connect = traced


def _before(owner: type, name: str) -> None:
    """Die when a method is called."""
    setattr(owner, name, die)


STEPS: dict[str, Callable[[], None]] = {
    "torn": lambda: _torn(5),
    "journaled": lambda: _journaled(5),
    "begin": lambda: _at_statement("BEGIN"),
    "insert": lambda: _at_statement("INSERT INTO requests"),
    "commit": lambda: _at_statement("COMMIT"),
    "committed": lambda: _before(Ledger, "_succeeded"),
    "sealed": lambda: _before(Segment, "remove"),
    "adopted": lambda: _before(Path, "unlink"),
}


def main(path: Path, first: int, count: int, step: str | None, *, admits: bool = False) -> None:
    """Append the rows and tell each on standard output once it is accepted."""
    book = PriceBook.default()
    if step is None or step not in ("begin", "insert", "commit"):
        Ledger(path, OPTIONS).register(book)
    ledger = Ledger(path, OPTIONS)
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
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), None if admitting else word, admits=admitting)
