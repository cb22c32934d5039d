"""The ledger: one row for each logical request, written exactly once, whatever happens to the process.

``append`` writes the row to the journal (one ``write``, no sync) and hands it to the one writer thread, which commits
groups to SQLite and syncs each. So when ``append`` has returned, ``kill -9`` loses nothing: the next ledger that opens
the same path imports the journal. A power failure loses at most what was not yet committed: the rows of the last
``commit_window_s``. A row that is already there (same request id) is left as it is and counted; one that differs from
it is an alarm. A database that cannot be written is an alarm and is tried again until it can, or until
``max_pending_rows`` wait: then ``append`` raises, and the gateway must stop admitting requests.
See ``docs/design/0003-ledger.md``.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

from billing import schema
from billing.entry import decode, entry_of
from billing.errors import LedgerClosedError, LedgerError, LedgerFullError
from billing.group import Values, write_group
from billing.journal import Segment, adopt
from billing.ledger_read import ALL_ROWS, LedgerReader, RowFilter, Totals
from billing.prices import PriceBook
from billing.rollup import ADVANCE_ROWS, advance
from billing.row import LedgerRow, row_values
from tracing.record import RequestRecord

log = logging.getLogger("keepwarm.billing.ledger")


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """Limits of the writer."""

    commit_window_s: float = 0.05  # how long the first row of a group waits for others
    max_group_rows: int = 5000  # rows in one transaction
    max_pending_rows: int = 200_000  # beyond this ``append`` refuses
    segment_bytes: int = 4 * 2**20  # a journal file is sealed when it is this long
    retry_s: float = 0.1  # first pause after a failed write; doubles up to ``max_retry_s``
    max_retry_s: float = 2.0
    adopt_interval_s: float = 5.0  # how often journals of dead processes are looked for


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """Counters since ``start``, and whether writing fails now. Each of the last six should be 0 or ``None``."""

    accepted: int = 0  # rows that ``append`` took
    committed: int = 0  # of those, rows that the database now holds (duplicates included)
    duplicates: int = 0  # rows that were already there
    recovered: int = 0  # rows imported from journals of processes that are gone
    died_in_flight: int = 0  # of such a process, requests that were admitted and have no row of their own
    pending: int = 0  # accepted and not yet committed
    conflicts: int = 0  # a row came twice with different content; the first one stands
    refused: int = 0  # rows that the table cannot hold; kept in the table ``refused``
    write_failures: int = 0
    journal_failures: int = 0  # rows that were accepted without a journal record
    damaged_bytes: int = 0  # unreadable bytes at the end of adopted journals
    failing_since_ns: int | None = None


_COUNTERS = tuple(field.name for field in fields(LedgerStatus) if field.name not in ("pending", "failing_since_ns"))


class Ledger:
    """The writer. Thread-safe; several processes may have the same path open."""

    def __init__(self, path: Path, options: LedgerOptions = LedgerOptions()) -> None:
        self.path = path
        self._options = options
        self._journal_dir = path.with_name(path.name + ".journal")
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._hurry = threading.Event()  # set: don't wait for a group to fill
        self._pending: list[Values] = []
        self._in_flight = 0
        self._segment: Segment | None = None
        self._spare: Segment | None = None  # the next journal file, made before it is needed
        self._sealed: list[Segment] = []
        self._owner, self._segments_made = uuid.uuid4().hex, 0
        self._admitted: dict[str, bytes] = {}  # the journal records of requests that have no row yet
        self._carried_bytes = 0  # of those, what this segment began with
        self._unrolled = 0  # rows committed since the rollups were brought up
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._failing_since_ns: int | None = None
        self._closing = False
        self._close_by = float("inf")
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Ledger:
        """Open or create the ledger, import what dead processes left, start the writer. Raises ``LedgerError``."""
        if self._thread is not None:
            raise LedgerError("the ledger has been started already")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._journal_dir.mkdir(mode=0o700, exist_ok=True)
            self._connection = schema.connect(self.path)
            self._adopt_at_start()
            self._segment = self._new_segment()
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"ledger {self.path} cannot be opened: {error}") from error
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()
        return self

    def __enter__(self) -> Ledger:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def register(self, book: PriceBook) -> None:
        """Store a price version, so that rows priced by it can be verified for ever. Idempotent; synced on return.

        Call it before the first request is priced by the book. Raises ``LedgerError``.
        """
        try:
            connection = schema.connect(self.path)
            try:
                connection.execute(
                    "INSERT INTO prices (version, name, currency, body) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (book.version, book.name, book.currency, book.body),
                )
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise LedgerError(f"price version {book.version} could not be stored: {error}") from error

    def admit(self, if_lost: RequestRecord) -> None:
        """Note that a request was admitted: its ``append`` follows, or else this process died.

        ``if_lost`` is the record that stands in that case: whoever imports the journal then writes its row. Not needed
        for ``append``, and costs the same. Raises ``LedgerClosedError``, ``LedgerError``.
        """
        _, payload = entry_of(row_values(if_lost), is_admission=True)
        with self._lock:
            if self._closing or self._segment is None:
                raise LedgerClosedError(f"ledger {self.path} is not open")
            self._journal(if_lost.request_id, payload)
            self._admitted[if_lost.request_id] = payload

    def append(self, record: RequestRecord) -> None:
        """Accept the row of a request; when this returns, ``kill -9`` no longer loses it.

        Never waits for the database. Raises ``LedgerFullError`` when too many rows wait, ``LedgerClosedError`` after
        ``close``, ``LedgerError`` for a number that no ledger can hold. Cost: some 20 to 40 µs.
        """
        entry, payload = entry_of(row_values(record))
        with self._lock:
            if self._closing or self._segment is None:
                raise LedgerClosedError(f"ledger {self.path} is not open; the row of {record.request_id} was not taken")
            if len(self._pending) + self._in_flight >= self._options.max_pending_rows:
                raise LedgerFullError(f"{self._options.max_pending_rows} rows wait for {self.path} to be writable")
            self._journal(record.request_id, payload)
            self._admitted.pop(record.request_id, None)
            self._pending.append(entry.values)
            self._count(accepted=1)
            if len(self._pending) == 1:
                self._wake.notify()

    def _journal(self, request_id: str, payload: bytes) -> None:
        """Write one record; the lock is held."""
        assert self._segment is not None
        try:
            self._segment.append(payload)
        except OSError as error:
            self._count(journal_failures=1)
            log.error("journal of ledger %s: %s; what it should say of %s is in memory only",
                      self.path, error, request_id)  # fmt: skip

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything accepted so far is committed and synced; ``False`` when that took too long."""
        with self._lock:
            target = self._counters["accepted"]
            self._hurry.set()
            return self._wake.wait_for(lambda: self._counters["committed"] >= target, timeout_s)

    def status(self) -> LedgerStatus:
        """Return the counters."""
        with self._lock:
            pending = len(self._pending) + self._in_flight
            return LedgerStatus(**self._counters, pending=pending, failing_since_ns=self._failing_since_ns)

    def close(self, timeout_s: float = 10.0) -> None:
        """Commit what waits and stop. Idempotent.

        Raises ``LedgerError`` when that could not be done in time; the rows are then in the journal, and the next
        ``start`` imports them.
        """
        with self._lock:
            if self._thread is None:
                return
            self._closing, self._close_by = True, time.monotonic() + timeout_s
            self._hurry.set()
            self._wake.notify_all()
        self._thread.join(timeout_s + schema.BUSY_TIMEOUT_S + 1)
        status = self.status()
        with self._lock:
            self._thread = None
            for segment in (*self._sealed, self._segment, self._spare):
                if segment is None:
                    continue
                if status.pending or self._admitted:
                    segment.close()
                else:
                    segment.remove()
            self._sealed, self._segment, self._spare = [], None, None
        if status.pending:
            lost = min(status.journal_failures, status.pending)
            raise LedgerError(
                f"{status.pending} rows could not be written to {self.path}; they are kept in {self._journal_dir}"
                + (f", but up to {lost} of them were in memory only" if lost else "")
            )

    def rows(self, where: RowFilter = ALL_ROWS) -> Iterator[LedgerRow]:
        """Go through the committed rows. Raises ``LedgerError``."""
        with LedgerReader(self.path) as reader:
            yield from reader.rows(where)

    def totals(self, where: RowFilter = ALL_ROWS) -> list[Totals]:
        """Sum the committed rows, one total for each currency. Raises ``LedgerError``."""
        with LedgerReader(self.path) as reader:
            return reader.totals(where)

    # The writer thread.

    def _run(self) -> None:
        try:
            while self._wait_for_rows():
                group = self._take_group()
                if group and not self._write_until_done(group):
                    break
        finally:
            if not self._closing:
                log.critical("the writer of ledger %s has died; rows gather in %s", self.path, self._journal_dir)
            if self._connection is not None:
                self._connection.close()

    def _wait_for_rows(self) -> bool:
        """Return when there are rows to write; ``False`` when the ledger is closed and there are none."""
        while True:
            with self._lock:
                if not self._pending and not self._closing:
                    self._wake.wait(self._options.adopt_interval_s)
                if self._pending:
                    break
                if self._closing:
                    return False
            self._tidy()
        self._hurry.wait(self._options.commit_window_s)
        return True

    def _take_group(self) -> list[Values]:
        """Take the next group; seal the journal file when it is full, so that it can go after the commit."""
        self._prepare_spare()
        with self._lock:
            limit = self._options.max_group_rows
            group, self._pending = self._pending[:limit], self._pending[limit:]
            self._in_flight = len(group)
            if not self._pending and not self._closing:
                self._hurry.clear()
            if not self._pending and self._segment is not None and self._spare is not None:
                self._sealed.append(self._segment)
                self._segment, self._spare = self._spare, None
                for request_id, payload in self._admitted.items():  # the sealed file will be removed
                    self._journal(request_id, payload)
                self._carried_bytes = self._segment.size_bytes
            return group

    def _is_full(self, segment: Segment) -> bool:
        return segment.size_bytes - self._carried_bytes >= self._options.segment_bytes

    def _new_segment(self) -> Segment:
        self._segments_made += 1
        return Segment(self._journal_dir, self._owner, self._segments_made)

    def _prepare_spare(self) -> None:
        """Make the next journal file when this one is full, without the lock: a slow disk keeps nobody waiting."""
        segment = self._segment
        if self._spare is None and segment is not None and self._is_full(segment):
            try:
                self._spare = self._new_segment()
            except OSError as error:
                log.error("journal of ledger %s: no new file: %s", self.path, error)

    def _write_until_done(self, group: Sequence[Values]) -> bool:
        """Commit a group, again and again if need be; ``False`` when the ledger closes before it could."""
        pause = self._options.retry_s
        while True:
            try:
                duplicates = self._write(group)
                break
            except (sqlite3.Error, LedgerError) as error:
                self._failed(error)
            if self._closing and time.monotonic() + pause > self._close_by:
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._options.max_retry_s)
        with self._lock:
            self._succeeded()
            done, self._sealed = self._sealed, []
        for segment in done:
            try:
                segment.remove()
            except OSError as error:  # it is imported again some day, and found to be there already
                log.error("journal %s cannot be removed: %s", segment.path, error)
        with self._lock:
            self._count(committed=len(group), duplicates=duplicates)
            self._in_flight = 0
            self._wake.notify_all()
        self._unrolled += len(group)
        if self._unrolled >= ADVANCE_ROWS:
            self._unrolled = 0
            self._roll_up()
        return True

    def _succeeded(self) -> None:
        """End an alarm; the lock is held."""
        if self._failing_since_ns is not None:
            log.warning("ledger %s can be written again", self.path)
            self._failing_since_ns = None

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self._failing_since_ns is None:
                log.error("ledger %s cannot be written: %s; trying until it can", self.path, error)
                self._failing_since_ns = time.time_ns()
            self._count(write_failures=1)
        if self._connection is not None:
            self._connection.close()  # whatever broke may have broken the connection
            self._connection = None

    def _write(self, group: Sequence[Values], *, only_if_absent: bool = False) -> int:
        """Commit a group and sync it; return how many of its rows were already there."""
        if self._connection is None:
            self._connection = schema.connect(self.path)
        written = write_group(self._connection, group, only_if_absent=only_if_absent)
        for request_id in written.conflicts:
            log.error("ledger %s: a second, different row came for %s; the first stands", self.path, request_id)
        for request_id, reason in written.refused:
            log.error("ledger %s: the row of %s cannot be held: %s", self.path, request_id, reason)
        with self._lock:
            self._count(conflicts=len(written.conflicts), refused=len(written.refused))
        return written.duplicates

    def _count(self, **by: int) -> None:
        """Add to the counters; the lock is held."""
        for name, number in by.items():
            self._counters[name] += number

    # Journals of processes that are gone.

    def _tidy(self) -> None:
        """Nothing waits to be written: import what dead processes left, bring the rollups up."""
        try:
            self._adopt()
        except (OSError, sqlite3.Error, LedgerError) as error:
            self._failed(error)
        else:
            with self._lock:
                self._succeeded()
            self._roll_up()

    def _roll_up(self) -> None:
        """Bring the rollups up until there is something better to do. They may lag: reports read the rows beyond."""
        try:
            if self._connection is None:
                self._connection = schema.connect(self.path)
            while advance(self._connection) and not self._pending:
                pass
        except (sqlite3.Error, LedgerError) as error:
            self._failed(error)

    def _adopt_at_start(self) -> None:
        """Import what there is, unless others keep the database busy: then the writer does it when it can."""
        try:
            self._adopt()
        except sqlite3.OperationalError as error:
            log.warning("ledger %s: journals of dead processes are imported later: %s", self.path, error)

    def _adopt(self) -> None:
        """Import the journals of dead processes. A file goes only after its rows are committed.

        A request that was admitted and has no row died with its process: the row is the one that its admission holds.
        """
        for orphan in adopt(self._journal_dir):
            entries = [decode(payload) for payload in orphan.payloads]
            rows = [entry.values for entry in entries if not entry.is_admission]
            billed = {values[0] for values in rows}
            lost = {e.request_id: e.values for e in entries if e.is_admission and e.request_id not in billed}
            recovered = self._import(rows)
            died = self._import(list(lost.values()), only_if_absent=True)
            with self._lock:
                self._count(recovered=recovered, died_in_flight=died, damaged_bytes=orphan.damaged_bytes)
            if died:
                log.warning("ledger %s: %d requests died with the process that served them", self.path, died)
            if orphan.damaged_bytes:
                log.error("journal %s: %d rows imported, %d bytes cannot be read; kept as .damaged",
                          orphan.paths[-1], len(rows), orphan.damaged_bytes)  # fmt: skip

    def _import(self, rows: Sequence[Values], *, only_if_absent: bool = False) -> int:
        """Write rows in groups; return how many were new."""
        duplicates = 0
        for start in range(0, len(rows), self._options.max_group_rows):
            duplicates += self._write(rows[start : start + self._options.max_group_rows], only_if_absent=only_if_absent)
        return len(rows) - duplicates
