"""The limits of the ledger's writer, what it tells of itself, and whom it tells of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from billing.row import LedgerRow


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """Limits of the writer."""

    commit_window_s: float = 0.25  # how long the first row of a group waits for others; the journal has it at once
    max_group_rows: int = 5000  # rows in one transaction
    max_memory_rows: int = 100_000  # rows that wait in memory as well; beyond it they wait in the journal alone
    max_journal_bytes: int = 8 * 2**30  # what may wait there (some ten million rows); beyond it ``append`` refuses
    segment_bytes: int = 4 * 2**20  # a journal file is sealed when it is this long
    retry_s: float = 0.1  # first pause after a failed write; doubles up to ``max_retry_s``
    max_retry_s: float = 2.0
    adopt_interval_s: float = 5.0  # how often journals of dead processes are looked for


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """Counters since ``start``, and whether writing fails now. From ``conflicts`` on each should be 0 or ``None``."""

    accepted: int = 0  # rows that ``append`` took
    committed: int = 0  # of those, rows that the database now holds (duplicates included)
    duplicates: int = 0  # rows that were already there
    recovered: int = 0  # rows imported from journals of processes that are gone
    died_in_flight: int = 0  # of such a process, requests that were admitted and have no row of their own
    pending: int = 0  # accepted and not yet committed
    spilled: int = 0  # of those, rows that wait in the journal alone
    spilled_bytes: int = 0
    conflicts: int = 0  # a row came twice with different content; the first one stands
    refused: int = 0  # rows that the table cannot hold; kept in the table ``refused``
    write_failures: int = 0
    lost: int = 0  # rows that waited in a journal file which was damaged meanwhile; it is kept as ``.damaged``
    journal_failures: int = 0  # rows that were accepted without a journal record
    damaged_bytes: int = 0  # unreadable bytes at the end of adopted journals
    failing_since_ns: int | None = None


#: Those of its fields that only rise.
COUNTERS = tuple(
    field.name
    for field in fields(LedgerStatus)
    if field.name not in ("pending", "spilled", "spilled_bytes", "failing_since_ns")
)


class Follower(Protocol):
    """Something that is told of every request beside the ledger and must end up agreeing with it: the trace store.

    It is told by the request's own process, a moment after the ledger. The journal is what remembers in between, so
    the ledger tells it what it finds in journals of dead processes, and lets no journal go before it has caught up.
    Its methods are called by the ledger's writer and must not raise; while one runs, rows wait.
    """

    def recovered(self, rows: Sequence[LedgerRow]) -> None:
        """These rows stand for requests whose process is gone; keep what is missing. May come twice."""

    def catch_up(self) -> None:
        """Return when everything that it has been told of is kept."""
