"""The trace store: every request's record, in an SQLite file or in PostgreSQL, listed by run.

``append`` never blocks and never does I/O: one writer thread commits what has arrived in the meantime (group commit).
Appending a record twice stores it once. The queue is bounded: a record that finds it full is dropped, counted and told
(``keepwarm_trace_dropped_records``), because a trace must not slow down the requests that it shows (the ledger, which
must not lose anything, is another store with other rules). While a server is away the writer waits for it, and the
queue fills. The bounds on age and number remove old records, runs whole; what is kept agrees with the ledger to the
last digit. ``keep`` is for callers that would rather wait: what is recovered of dead processes. Reading methods block:
use a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tracing.detail import StepDetail, encode_detail
from tracing.errors import TraceStoreError, TraceStoreUnavailable
from tracing.handoff import Handoff
from tracing.received import ReceivedSpan, encode_span
from tracing.record import RequestRecord
from tracing.store_database import Parameters, Place, Row
from tracing.store_lists import Money, RunFilter, RunKey, RunSummary, StoreTotals
from tracing.store_reader import TraceReader
from tracing.store_schema import INSERT_DETAIL, INSERT_LIFE, INSERT_SPAN, Statement, row_of
from tracing.store_writer import TraceStoreOptions, commit, forget_old

__all__ = [
    "Money",
    "RunFilter",
    "RunKey",
    "RunSummary",
    "StoreTotals",
    "TraceStore",
    "TraceStoreOptions",
    "TraceStoreStats",
]

_GATHER_S = 0.25  # records are committed together; a reader sees one that much later
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two tries to reach a server


@dataclass(slots=True)
class TraceStoreStats:
    """Counters since the store was opened."""

    appended: int = 0
    dropped: int = 0  # found the queue full, or could not be written
    waiting: int = 0  # in the queue now


@dataclass(slots=True)
class _Flush:
    done: threading.Event = field(default_factory=threading.Event)
    committed: bool = False


@dataclass(frozen=True, slots=True)
class _Extra:
    """What is written beside records."""

    statements: Sequence[Statement]


class TraceStore(TraceReader):
    """Records in a database: the path of an SQLite file, or what ``tracing.store_database.database_at`` returns.

    Thread-safe. ``read_only`` opens what another process may be writing. Raises ``TraceStoreError``.
    """

    def __init__(self, place: Place, options: TraceStoreOptions | None = None, *, read_only: bool = False) -> None:
        super().__init__(place)
        self._options = options or TraceStoreOptions()
        self._queue: Handoff[Row | _Extra | _Flush | None] = Handoff(self._options.queue_records, _GATHER_S)
        self._stats = TraceStoreStats()
        self._writer: threading.Thread | None = None
        self._ending = threading.Event()
        self._failure: str | None = None
        self._is_away = False
        try:
            self._database.prepare(read_only=read_only)
        except TraceStoreUnavailable as error:
            if read_only or not self._database.may_be_away:
                raise
            self._failure = str(error)
        if not read_only:
            self._writer = threading.Thread(target=self._write_all, name="keepwarm-trace-store", daemon=True)
            self._writer.start()

    def append(self, record: RequestRecord) -> None:
        """Hand a record to the writer; returns at once. Raises :class:`UnstorableRecord` for what JSON can't hold.

        Raises :class:`TraceStoreError` when the store is closed or read-only.
        """
        if self._writer is None:
            raise TraceStoreError(f"the trace store {self.name} is closed or was opened read-only")
        row = row_of(record)
        if self._queue.put(row):
            self._stats.appended += 1
        else:
            self._stats.dropped += 1

    def keep(self, records: Sequence[RequestRecord], timeout_s: float) -> bool:
        """Hand records to the writer, waiting for room, and for their commit; whether that happened in time.

        Raises as :meth:`append`. Not for a request's path.
        """
        if self._writer is None:
            raise TraceStoreError(f"the trace store {self.name} is closed or was opened read-only")
        deadline = time.monotonic() + timeout_s
        for record in records:
            if not self._queue.put_within(row_of(record), deadline - time.monotonic()):
                return False
            self._stats.appended += 1
        return self.flush(max(0.0, deadline - time.monotonic()))

    def describe(self, detail: StepDetail) -> None:
        """Hand the detail of a record that was appended before to the writer; returns at once, and drops when full."""
        values: Parameters = {"detail": encode_detail(detail), "request_id": detail.request_id}
        self._add(_Extra([(INSERT_DETAIL, values)]))

    def receive(self, tenant: str, spans: Sequence[ReceivedSpan], at_ns: int) -> bool:
        """Hand spans that an agent sent to the writer; returns at once: whether there was room for them."""
        values = (
            {
                "tenant": tenant, "trace_id": span.trace_id, "span_id": span.span_id, "run_id": span.run_id,
                "tool_call_id": span.tool_call_id, "received_ns": at_ns, "body": encode_span(span),
            }
            for span in spans
        )  # fmt: skip
        return self._add(_Extra([(INSERT_SPAN, each) for each in values]))

    def began(self, instance: str, at_ns: int) -> None:
        """Note that an engine began anew, with nothing in its caches; returns at once."""
        self._add(_Extra([(INSERT_LIFE, {"instance": instance, "began_ns": at_ns})]))

    def _add(self, extra: _Extra) -> bool:
        return self._writer is not None and self._queue.put(extra)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended before is committed; whether that happened in time.

        Waits for no server that is away.
        """
        if self._writer is None or not self._writer.is_alive():
            return not len(self._queue)
        flush = _Flush()
        deadline = time.monotonic() + timeout_s
        if not self._queue.put_within(flush, timeout_s):
            return False
        self._queue.hurry()
        while not flush.done.wait(min(_GATHER_S, max(0.0, deadline - time.monotonic()))):
            if self._is_away or time.monotonic() >= deadline:
                return False
        return flush.committed

    def close(self, timeout_s: float = 5.0) -> bool:
        """Commit what is queued and stop; whether all of it was committed in time. Idempotent."""
        done = True
        if self._writer is not None:
            self._ending.set()
            done = self._queue.put_within(None, timeout_s)
            self._queue.hurry()
            self._writer.join(timeout_s)
            done = done and not self._writer.is_alive() and self._failure is None
            self._writer = None
        self._database.close()
        return done

    def stats(self) -> TraceStoreStats:
        """Counters since the store was opened."""
        return TraceStoreStats(self._stats.appended, self._stats.dropped, len(self._queue))

    @property
    def failure(self) -> str | None:
        """Why the last commit failed, ``None`` while writing works."""
        return self._failure

    # ---- the writer's thread

    def _write_all(self) -> None:
        since_retention = self._options.retention_records
        running = True
        while running:
            rows, statements, flushes, running = self._collect()
            self._failure = self._store(rows, statements)
            if self._failure is None:
                since_retention += len(rows)
                if since_retention >= self._options.retention_records:
                    since_retention = 0
                    self._failure = self._forget_old()
            else:
                self._stats.dropped += len(rows)
            for flush in flushes:
                flush.committed = self._failure is None
                flush.done.set()

    def _store(self, rows: Sequence[Row], statements: Sequence[Statement]) -> str | None:
        """Commit a batch, waiting for a server that is away; returns why it could not be committed."""
        pause_s = _PAUSE_S
        while rows or statements:
            try:
                with self._database.writing() as session:
                    commit(session, rows, statements)
                self._is_away = False
                break
            except TraceStoreUnavailable as error:
                self._failure, self._is_away = str(error), True
                if self._ending.wait(pause_s):
                    return self._failure
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except TraceStoreError as error:
                return str(error)
        return None

    def _forget_old(self) -> str | None:
        try:
            with self._database.writing() as session:
                forget_old(session, self._options, time.time_ns())
        except TraceStoreError as error:
            return str(error)
        return None

    def _collect(self) -> tuple[list[Row], list[Statement], list[_Flush], bool]:
        """Wait for items and take what is there, up to a batch; the last value is false at the end."""
        rows: list[Row] = []
        statements: list[Statement] = []
        flushes: list[_Flush] = []
        for item in self._queue.take(self._options.batch_records):
            if item is None:
                return rows, statements, flushes, False
            if isinstance(item, _Flush):
                flushes.append(item)
            elif isinstance(item, _Extra):
                statements += item.statements
            else:
                rows.append(item)
        return rows, statements, flushes, True
