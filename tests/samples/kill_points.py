"""The steps of the ledger's write path at which a test kills its own process, as an out-of-memory killer would.

``arm(step, ledger)`` sets the trap in a running ledger; the next time it comes to that step, the process is gone. The
steps of the database are found by statement, in both kinds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from billing import journal
from billing.database_sqlite import SqliteSession
from billing.journal import Orphan, Segment
from billing.ledger import Ledger


def die(*_: object) -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _torn(_: Ledger) -> None:
    """Die with half of a record written."""
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if fd <= 2:
            return write(fd, data)
        write(fd, data[: len(data) // 2])
        die()
        return 0

    journal.os.write = half  # type: ignore[assignment]


def _journaled(_: Ledger) -> None:
    """Die between the journal and the queue: the row was never acknowledged."""
    append = Segment.append

    def then_die(self: Segment, payload: bytes) -> None:
        append(self, payload)
        die()

    Segment.append = then_die  # type: ignore[method-assign]


def _at_statement(*starts: str) -> Callable[[Ledger], None]:
    """Die when the writer is about to run a statement."""

    def arm(ledger: Ledger) -> None:
        session = ledger._connected()
        if isinstance(session, SqliteSession):
            session.on_statement(lambda statement: die() if statement.startswith(starts) else None)
            return
        from sqlalchemy import event

        connection = session._connection  # type: ignore[attr-defined]
        if "COMMIT" in starts:
            event.listen(connection, "commit", die)
        elif "BEGIN" in starts:
            event.listen(connection, "begin", die)
        else:
            event.listen(
                connection,
                "before_cursor_execute",
                lambda _c, _cursor, statement, *_: die() if statement.lstrip().startswith("WITH given") else None,
            )

    return arm


def _before(owner: type, name: str) -> Callable[[Ledger], None]:
    """Die when a method is called."""
    return lambda _: setattr(owner, name, die)


STEPS: dict[str, Callable[[Ledger], None]] = {
    "torn": _torn,
    "journaled": _journaled,
    "begin": _at_statement("BEGIN"),
    "insert": _at_statement("INSERT INTO requests"),
    "commit": _at_statement("COMMIT"),
    "committed": _before(Ledger, "_succeeded"),
    "sealed": _before(Segment, "remove"),
    "folded": _before(Ledger, "_roll_up"),
    "adopted": _before(Orphan, "remove"),
}


def arm(step: str, ledger: Ledger) -> None:
    """Set the trap."""
    STEPS[step](ledger)
