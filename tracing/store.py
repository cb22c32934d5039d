"""The embedded trace store: every request's record in one SQLite file, listed by run.

``append`` never blocks and never does I/O: one writer thread commits what has arrived in the meantime (group commit),
in WAL mode, so what was committed survives ``kill -9``. Appending a record twice stores it once. The queue is bounded:
a record that finds it full is dropped, counted and told (``keepwarm_trace_dropped_records``), because a trace must not
slow down the requests that it shows (the ledger, which must not lose anything, is another file with other rules). The
bounds on age and number remove old records, runs whole; what is kept agrees with the ledger to the last digit. ``keep``
is for callers that would rather wait: what is recovered of dead processes. Reading methods block: use a thread.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tracing import store_outline, store_series
from tracing.detail import StepDetail, decode_detail, encode_detail
from tracing.errors import AmbiguousRunError, TraceStoreError
from tracing.handoff import Handoff
from tracing.received import ReceivedSpan, decode_span, encode_span
from tracing.record import RequestRecord
from tracing.store_lists import Money, RunFilter, RunKey, RunSummary, StoreTotals, condition_of, summary, totals
from tracing.store_outline import RunCall, RunOutline
from tracing.store_schema import (
    COLUMNS,
    INSERT_DETAIL,
    INSERT_SPAN,
    SCHEMA_VERSION,
    Row,
    Statement,
    decode_record,
    row_of,
)
from tracing.store_series import Bucket, Choices
from tracing.store_writer import TraceStoreOptions, commit, forget_old, open_for_writing

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

_CHUNK = 500  # requests asked for at once
_GATHER_S = 0.25  # records are committed together; a reader sees one that much later


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


class TraceStore:
    """Records in a SQLite file. Thread-safe. ``read_only`` opens a file that another process may be writing."""

    def __init__(self, path: Path, options: TraceStoreOptions | None = None, *, read_only: bool = False) -> None:
        self._path = path
        self._options = options or TraceStoreOptions()
        self._reader_lock = threading.Lock()
        self._queue: Handoff[Row | _Extra | _Flush | None] = Handoff(self._options.queue_records, _GATHER_S)
        self._stats = TraceStoreStats()
        self._writer: threading.Thread | None = None
        self._failure: str | None = None
        try:
            if read_only:
                self._reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                connection = open_for_writing(path)
                self._reader = sqlite3.connect(path, check_same_thread=False)
                self._writer = threading.Thread(
                    target=self._write_all, args=(connection,), name="keepwarm-trace-store", daemon=True
                )
                self._writer.start()
            _verify_version(self._reader)
        except (sqlite3.Error, OSError) as error:
            raise TraceStoreError(f"can't open the trace store {path}: {error}") from error

    # ---- writing

    def append(self, record: RequestRecord) -> None:
        """Hand a record to the writer; returns at once. Raises :class:`UnstorableRecord` for what JSON can't hold.

        Raises :class:`TraceStoreError` when the store is closed or read-only.
        """
        if self._writer is None:
            raise TraceStoreError(f"the trace store {self._path} is closed or was opened read-only")
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
            raise TraceStoreError(f"the trace store {self._path} is closed or was opened read-only")
        deadline = time.monotonic() + timeout_s
        for record in records:
            if not self._queue.put_within(row_of(record), deadline - time.monotonic()):
                return False
            self._stats.appended += 1
        return self.flush(max(0.0, deadline - time.monotonic()))

    def describe(self, detail: StepDetail) -> None:
        """Hand the detail of a record that was appended before to the writer; returns at once, and drops when full."""
        self._add(_Extra([(INSERT_DETAIL, (encode_detail(detail), detail.request_id))]))

    def receive(self, tenant: str, spans: Sequence[ReceivedSpan], at_ns: int) -> bool:
        """Hand spans that an agent sent to the writer; returns at once: whether there was room for them."""
        return self._add(
            _Extra(
                [
                    (INSERT_SPAN, (tenant, s.trace_id, s.span_id, s.run_id, s.tool_call_id, at_ns, encode_span(s)))
                    for s in spans
                ]
            )
        )

    def _add(self, extra: _Extra) -> bool:
        return self._writer is not None and self._queue.put(extra)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended before is committed; whether that happened in time."""
        if self._writer is None or not self._writer.is_alive():
            return not len(self._queue)
        flush = _Flush()
        deadline = time.monotonic() + timeout_s
        if not self._queue.put_within(flush, timeout_s):
            return False
        self._queue.hurry()
        return flush.done.wait(max(0.0, deadline - time.monotonic())) and flush.committed

    def close(self, timeout_s: float = 5.0) -> bool:
        """Commit what is queued and stop; whether all of it was committed in time. Idempotent."""
        done = True
        if self._writer is not None:
            done = self._queue.put_within(None, timeout_s)
            self._queue.hurry()
            self._writer.join(timeout_s)
            done = done and not self._writer.is_alive()
            self._writer = None
        with self._reader_lock:
            self._reader.close()
        return done

    def stats(self) -> TraceStoreStats:
        """Counters since the store was opened."""
        return TraceStoreStats(self._stats.appended, self._stats.dropped, len(self._queue))

    @property
    def failure(self) -> str | None:
        """Why the last commit failed, ``None`` while writing works."""
        return self._failure

    # ---- reading

    def record(self, request_id: str) -> RequestRecord | None:
        """One request's record."""
        with self._reading() as reader:
            row = reader.execute("SELECT body FROM records WHERE request_id = ?", (request_id,)).fetchone()
        return decode_record(row[0]) if row else None

    def detail(self, request_id: str) -> StepDetail | None:
        """One request's detail."""
        return self.details([request_id]).get(request_id)

    def details(self, request_ids: Iterable[str]) -> dict[str, StepDetail]:
        """The details of these requests, as far as there are any."""
        found: dict[str, StepDetail] = {}
        wanted = list(request_ids)
        for at in range(0, len(wanted), _CHUNK):
            some = wanted[at : at + _CHUNK]
            with self._reading() as reader:
                rows = reader.execute(
                    "SELECT request_id, detail FROM records WHERE detail IS NOT NULL AND request_id IN"
                    f" ({', '.join('?' * len(some))})",
                    some,
                ).fetchall()
            found |= {request_id: decode_detail(body) for request_id, body in rows}
        return found

    def spans_of(self, records: Sequence[RequestRecord], limit: int = 5000) -> list[ReceivedSpan]:
        """The spans that agents sent of one run: of its traces, of its tool calls, and those that name it."""
        if not records or (link := records[0].link) is None:
            return []
        tenant = records[0].identity.tenant
        wanted = [
            ("run_id", [link.run_id]),
            ("trace_id", list({r.traceparent[3:35] for r in records if r.traceparent is not None})),
            ("tool_call_id", list({call.id for record in records for call in record.tool_calls if call.id})),
        ]
        found: dict[tuple[str, str], ReceivedSpan] = {}
        for column, values in wanted:
            for at in range(0, len(values), _CHUNK):
                some = values[at : at + _CHUNK]
                with self._reading() as reader:
                    rows = reader.execute(
                        f"SELECT body FROM spans WHERE tenant = ? AND {column} IN ({', '.join('?' * len(some))})"
                        " LIMIT ?",
                        (tenant, *some, limit),
                    ).fetchall()
                for (body,) in rows:
                    span = decode_span(body)
                    found[span.trace_id, span.span_id] = span
        return sorted(found.values(), key=lambda span: (span.started_ns, span.span_id))[:limit]

    def run(self, run_id: str, tenant: str | None = None) -> list[RequestRecord]:
        """A run's records in step order; empty when there is none.

        Run ids that clients choose may be the same for several tenants: raises :class:`AmbiguousRunError` when they
        are and ``tenant`` is not given.
        """
        with self._reading() as reader:
            tenant = _tenant_of(reader, run_id, tenant)
            rows = reader.execute(
                "SELECT body FROM records WHERE tenant = ? AND run_id = ? ORDER BY step, seq", (tenant, run_id)
            ).fetchall()
        return [decode_record(row[0]) for row in rows]

    def outline(self, run_id: str, tenant: str | None = None) -> RunOutline | None:
        """A run's sums and its steps in outline; ``None`` when there is none. Raises as :meth:`run`."""
        with self._reading() as reader:
            tenant = _tenant_of(reader, run_id, tenant)
            return None if tenant is None else store_outline.outline(reader, tenant, run_id)

    def part(self, run_id: str, tenant: str, start: int, steps: int) -> list[RequestRecord]:
        """Some of a run's records in step order, counted from 0. Cost: those, and a walk over an index before them."""
        with self._reading() as reader:
            rows = reader.execute(
                "SELECT body FROM records WHERE seq IN (SELECT seq FROM records WHERE tenant = ? AND run_id = ?"
                " ORDER BY step, seq LIMIT ? OFFSET ?) ORDER BY step, seq",
                (tenant, run_id, steps, start),
            ).fetchall()
        return [decode_record(row[0]) for row in rows]

    def called_runs(self, tenant: str, since_ns: int, until_ns: int, limit: int = 200) -> list[RunCall]:
        """The runs that began in a time because another run called for them, oldest first."""
        with self._reading() as reader:
            return store_outline.called_runs(reader, tenant, since_ns, until_ns, limit)

    def summary(self, run_id: str, tenant: str) -> RunSummary | None:
        """One run's sums, ``None`` where there is none of that name."""
        with self._reading() as reader:
            known = reader.execute("SELECT 1 FROM runs WHERE tenant = ? AND run_id = ?", (tenant, run_id)).fetchone()
            return summary(reader, tenant, run_id) if known else None

    def runs(self, limit: int = 100, where: RunFilter | None = None) -> list[RunSummary]:
        """The most recent runs, newest first. Cost: the records of the runs that are returned."""
        condition, values = condition_of(where or RunFilter())
        with self._reading() as reader:
            named = reader.execute(
                f"SELECT tenant, run_id FROM runs WHERE {condition} ORDER BY last_ns DESC, tenant DESC, run_id DESC"
                " LIMIT ?",
                (*values, limit),
            ).fetchall()
            return [summary(reader, tenant, run_id) for tenant, run_id in named]

    def recent(self, limit: int) -> list[RequestRecord]:
        """The last ``limit`` records, oldest first, of runs or not; what a restarted run linker takes up again."""
        with self._reading() as reader:
            rows = reader.execute("SELECT body FROM records ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
        return [decode_record(row[0]) for row in reversed(rows)]

    def records(self, batch: int = 500) -> Iterator[RequestRecord]:
        """Every record in the order of arrival at the store; reads ``batch`` at a time and holds nothing between."""
        after = 0
        while True:
            with self._reading() as reader:
                rows = reader.execute(
                    "SELECT seq, body FROM records WHERE seq > ? ORDER BY seq LIMIT ?", (after, batch)
                ).fetchall()
            for seq, body in rows:
                after = seq
                yield decode_record(body)
            if not rows:
                return

    def arrived(
        self, since_ns: int | None = None, until_ns: int | None = None, batch: int = 500
    ) -> Iterator[RequestRecord]:
        """The records of a time span in order of arrival; reads ``batch`` at a time and holds nothing between."""
        place = (-(2**63) if since_ns is None else since_ns, 0)
        while True:
            with self._reading() as reader:
                rows = reader.execute(
                    "SELECT arrived_ns, seq, body FROM records"
                    " WHERE arrived_ns >= ? AND (arrived_ns, seq) > (?, ?) AND arrived_ns < ?"
                    " ORDER BY arrived_ns, seq LIMIT ?",
                    (place[0], *place, 2**63 - 1 if until_ns is None else until_ns, batch),
                ).fetchall()
            for arrived_ns, seq, body in rows:
                place = (arrived_ns, seq)
                yield decode_record(body)
            if not rows:
                return

    def totals(self, tenant: str | None = None, since_ns: int | None = None) -> StoreTotals:
        """Exact sums over the records of a time span. Cost: every record in it."""
        with self._reading() as reader:
            return totals(reader, tenant, since_ns)

    def buckets(self, tenant: str | None, since_ns: int, until_ns: int, bucket_ns: int) -> list[Bucket]:
        """Sums over a time by bucket, empty ones left out. Cost: every record in it."""
        with self._reading() as reader:
            return store_series.buckets(reader, tenant, since_ns, until_ns, bucket_ns)

    def ttfts(self, tenant: str | None, since_ns: int, until_ns: int, limit: int = 20_000) -> list[int]:
        """Times to the first token (ns, ascending) of the newest ``limit`` records of a time."""
        with self._reading() as reader:
            return store_series.ttfts(reader, tenant, since_ns, until_ns, limit)

    def newest(self) -> int:
        """A number that grows with every record, whichever process stored it: whether there is something new."""
        with self._reading() as reader:
            return store_series.newest(reader)

    def choices(self, tenant: str | None, newest_records: int = 2_000) -> Choices:
        """Models, agents and teams of the newest records."""
        with self._reading() as reader:
            return store_series.choices(reader, tenant, newest_records)

    def count(self) -> int:
        """How many records are stored."""
        with self._reading() as reader:
            return int(reader.execute("SELECT count(*) FROM records").fetchone()[0])

    def check(self) -> None:
        """Verify the file and that columns and bodies agree. Raises :class:`TraceStoreError`; reads everything."""
        with self._reading() as reader:
            if (problem := reader.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise TraceStoreError(f"{self._path}: {problem}")
            for stored in reader.execute(f"SELECT {COLUMNS} FROM records"):
                if row_of(decode_record(stored[-1])) != stored:
                    raise TraceStoreError(f"{self._path}: columns and body of record {stored[0]!r} differ")
            listed, stored = (
                "SELECT tenant, run_id FROM runs",
                "SELECT tenant, run_id FROM records WHERE run_id IS NOT NULL",
            )
            for missing, problem in (
                (f"{stored} EXCEPT {listed}", "not listed"),
                (f"{listed} EXCEPT {stored}", "empty"),
            ):
                if runs := reader.execute(f"SELECT count(*) FROM ({missing})").fetchone()[0]:
                    raise TraceStoreError(f"{self._path}: {runs} runs are {problem}")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Within the block everything is of one state of the store."""
        with self._reader_lock:
            try:
                self._reader.execute("BEGIN")
                try:
                    yield self._reader
                finally:
                    self._reader.rollback()
            except sqlite3.Error as error:
                raise TraceStoreError(f"can't read the trace store {self._path}: {error}") from error

    # ---- the writer's thread

    def _write_all(self, connection: sqlite3.Connection) -> None:
        since_retention = self._options.retention_records
        running = True
        while running:
            rows, statements, flushes, running = self._collect()
            try:
                commit(connection, rows, statements)
                since_retention += len(rows)
                if since_retention >= self._options.retention_records:
                    since_retention = 0
                    forget_old(connection, self._options, time.time_ns())
                self._failure = None
            except sqlite3.Error as error:
                self._failure = str(error)
                self._stats.dropped += len(rows)
            for flush in flushes:
                flush.committed = self._failure is None
                flush.done.set()
        connection.close()

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


def _tenant_of(reader: sqlite3.Connection, run_id: str, tenant: str | None) -> str | None:
    """Whose run is meant; ``None`` when there is none of that name. Raises :class:`AmbiguousRunError`."""
    if tenant is not None:
        return tenant
    tenants = [row[0] for row in reader.execute("SELECT tenant FROM runs WHERE run_id = ?", (run_id,))]
    if len(tenants) > 1:
        raise AmbiguousRunError(run_id, tenants)
    return tenants[0] if tenants else None


def _verify_version(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if 0 < version < SCHEMA_VERSION:
        raise TraceStoreError(
            f"the trace store has schema {version}, which the next start of 'keepwarm serve' brings to {SCHEMA_VERSION}"
        )
    if version != SCHEMA_VERSION:
        raise TraceStoreError(f"the trace store has schema {version}, this build reads {SCHEMA_VERSION}")
