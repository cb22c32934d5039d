"""The steps of the ledger's write path at which a test kills its own process, as an out-of-memory killer would.

``arm(step, ledger)`` sets the trap in a running ledger; the next time it comes to that step, the process is gone. The
steps of the database are found by statement, in both kinds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from sqlalchemy import event

from billing import journal
from billing.database import LedgerSession
from billing.database_sqlite import SqliteSession
from billing.journal import Orphan, Segment
from billing.ledger import Ledger
from billing.postgres.database import PostgresSession


def die(*_: object) -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def torn(records: int) -> None:
    """Die with half of a journal record written, after so many whole ones."""
    write, left = os.write, [records]

    def half(fd: int, data: bytes) -> int:
        left[0] -= fd > 2
        if left[0] < 0:
            write(fd, data[: len(data) // 2])
            die()
        return write(fd, data)

    journal.os.write = half  # type: ignore[assignment]


def journaled(records: int) -> None:
    """Die between the journal and the queue, after so many records: the row was never acknowledged."""
    append, left = Segment.append, [records]

    def then_die(self: Segment, payload: bytes) -> None:
        append(self, payload)
        left[0] -= 1
        if left[0] < 0:
            die()

    Segment.append = then_die  # type: ignore[method-assign]


def watch(session: LedgerSession, start: str) -> None:
    """Die when a session is about to run BEGIN, COMMIT, or the INSERT of rows."""
    if isinstance(session, SqliteSession):
        wanted = "INSERT INTO requests" if start == "INSERT" else start
        session.on_statement(lambda statement: die() if statement.startswith(wanted) else None)
        return
    assert isinstance(session, PostgresSession)
    if start == "INSERT":
        event.listen(
            session._connection,
            "before_cursor_execute",
            lambda _connection, _cursor, statement, *_: die() if "INSERT INTO requests" in statement else None,
        )
    else:
        event.listen(session._connection, start.lower(), die)


def _at_statement(start: str) -> Callable[[Ledger], None]:
    """Die when the writer is about to run a statement."""
    return lambda ledger: watch(ledger._connected(), start)


def _before(owner: type, name: str) -> Callable[[Ledger], None]:
    """Die when a method is called."""
    return lambda _: setattr(owner, name, die)


STEPS: dict[str, Callable[[Ledger], None]] = {
    "torn": lambda _: torn(0),
    "journaled": lambda _: journaled(0),
    "begin": _at_statement("BEGIN"),
    "insert": _at_statement("INSERT"),
    "commit": _at_statement("COMMIT"),
    "committed": _before(Ledger, "_succeeded"),
    "sealed": _before(Segment, "remove"),
    "folded": _before(Ledger, "_roll_up"),
    "adopted": _before(Orphan, "remove"),
}


def arm(step: str, ledger: Ledger) -> None:
    """Set the trap."""
    STEPS[step](ledger)
