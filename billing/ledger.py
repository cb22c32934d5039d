"""The ledger: one row for each logical request, written exactly once, whatever happens to the process.

``append`` writes the row to the journal (one ``write``, no sync) and hands it to the one writer thread, which commits
groups to the database and syncs each. So when ``append`` has returned, ``kill -9`` loses nothing: the next ledger that
opens the same journal folder imports it. A power failure loses at most what was not yet committed: the rows of the last
``commit_window_s``. A row that is already there (same request id) is left as it is and counted; one that differs from
it is an alarm. A database that cannot be written is an alarm and is tried again until it can: meanwhile rows wait in
memory, then in the journal alone, up to ``max_journal_bytes``: then ``append`` raises, and the gateway must stop
admitting requests. See ``docs/design/0003-ledger.md``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from billing import price_store
from billing.adoption import Adopted, Adoption
from billing.database import LedgerSession, Place, Values, database_at
from billing.entry import decode, entry_of
from billing.errors import LedgerClosedError, LedgerError, LedgerFullError, LedgerUnavailable
from billing.group import write_group
from billing.journal import Segment
from billing.ledger_options import COUNTERS, Follower, LedgerOptions, LedgerStatus
from billing.ledger_read import ALL_ROWS, LedgerReader, RowFilter, Totals
from billing.prices import PriceBook
from billing.rollup import ADVANCE_ROWS, advance
from billing.row import LedgerRow, row_values
from billing.spool import Spool
from tracing.record import RequestRecord

__all__ = ["Follower", "Ledger", "LedgerOptions", "LedgerStatus"]

log = logging.getLogger("keepwarm.billing.ledger")

_DEFAULTS = LedgerOptions()


class Ledger:
    """The writer. Thread-safe; several processes may have the same ledger open, on one machine or, with a server, many.

    ``follower``: what else is told of each request, and has to agree with the ledger whatever dies.
    """

    def __init__(
        self,
        place: Place,
        options: LedgerOptions = _DEFAULTS,
        *,
        follower: Follower | None = None,
    ) -> None:
        self._database = database_at(place)
        self.name = self._database.name
        self._options = options
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._hurry = threading.Event()  # set: don't wait for a group to fill
        self._pending: list[Values] = []
        self._in_flight = 0
        self._spool: Spool | None = None
        self._adoption = Adoption(
            self._database.journal_dir,
            write=lambda rows, only_if_absent: self._write(rows, only_if_absent=only_if_absent),
            stored=lambda ids: self._connected().rows_of(ids),
            group_rows=options.max_group_rows,
            told=None if follower is None else follower.recovered,
        )
        self._follower = follower
        self._done: list[Segment] = []  # files that may go as soon as the follower has caught up
        self._adopt_at = 0.0  # when journals of dead processes are looked for next
        self._unrolled = 0  # rows committed since the rollups were brought up
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._failing_since_ns: int | None = None
        self._closing = False
        self._close_by = float("inf")
        self._session: LedgerSession | None = None
        self._thread: threading.Thread | None = None

    @property
    def writer_id(self) -> str:
        """The name that this writer's journal files begin with. Only after ``start``."""
        assert self._spool is not None
        return self._spool.writer_id

    def start(self) -> Ledger:
        """Open or create the ledger, import what dead processes left, start the writer. Raises ``LedgerError``.

        A server that is away is an alarm, not an error: rows wait in the journal until it is back.
        """
        if self._thread is not None:
            raise LedgerError("the ledger has been started already")
        try:
            self._database.journal_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connect_at_start()
            self._spool = Spool(self._database.journal_dir, self._options.segment_bytes)
        except OSError as error:
            raise LedgerError(f"the journal of ledger {self.name} cannot be written: {error}") from error
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()
        return self

    def __enter__(self) -> Ledger:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def register(self, book: PriceBook) -> None:
        """Store a price version, so that rows priced by it can be verified for ever. Idempotent.

        Call it before the first request is priced by the book. On return it is synced, in the database or, while that
        is away, in the journal folder, from where it is stored before any row is. Raises ``LedgerError``.
        """
        try:
            session = self._database.open()
            try:
                price_store.store(session, book)
            finally:
                session.close()
        except LedgerUnavailable as error:
            log.error("price version %s is stored later: %s", book.version, error)
            price_store.leave(self._database.journal_dir, book)

    def admit(self, if_lost: RequestRecord) -> None:
        """Note that a request was admitted: its ``append`` follows, or else this process died.

        ``if_lost`` is the record that stands in that case: whoever imports the journal then writes its row. Not needed
        for ``append``, and costs the same. Raises ``LedgerFullError`` when there might be no room for its row either,
        ``LedgerClosedError``, ``LedgerError``.
        """
        _, payload = entry_of(row_values(if_lost), is_admission=True)
        with self._lock:
            spool = self._open_spool(if_lost.request_id)
            self._check_room(spool)
            if not self._spills(spool):
                self._journal(spool.admit, if_lost.request_id, payload)
                return
            try:
                self._to_journal_alone(spool.admit, if_lost.request_id, payload)
            except LedgerFullError:
                spool.refused(if_lost.request_id)
                raise

    def append(self, record: RequestRecord) -> None:
        """Accept the row of a request; when this returns, ``kill -9`` no longer loses it.

        Never waits for the database. Raises ``LedgerFullError`` when too much waits, ``LedgerClosedError`` after
        ``close``, ``LedgerError`` for a number that no ledger can hold. Cost: some 20 to 40 µs.
        """
        entry, payload = entry_of(row_values(record))
        with self._lock:
            spool = self._open_spool(record.request_id)
            if self._spills(spool):
                self._check_room(spool)
                self._to_journal_alone(spool.spill, record.request_id, payload)
            else:
                self._journal(spool.append, record.request_id, payload)
                self._pending.append(entry.values)
            self._count(accepted=1)
            if len(self._pending) == 1:
                self._wake.notify()

    def _open_spool(self, request_id: str) -> Spool:
        if self._closing or self._spool is None:
            raise LedgerClosedError(f"ledger {self.name} is not open; what it should say of {request_id} was not taken")
        return self._spool

    def _journal(self, write: Callable[[str, bytes], None], request_id: str, payload: bytes) -> None:
        """Write one record of what is in memory as well; the lock is held."""
        try:
            write(request_id, payload)
        except OSError as error:
            self._count(journal_failures=1)
            log.error("journal of ledger %s: %s; what it should say of %s is in memory only",
                      self.name, error, request_id)  # fmt: skip

    def _spills(self, spool: Spool) -> bool:
        """Tell whether a row that came now would be in the journal alone; the lock is held."""
        return spool.is_spilling or len(self._pending) + self._in_flight >= self._options.max_memory_rows

    def _to_journal_alone(self, write: Callable[[str, bytes], None], request_id: str, payload: bytes) -> None:
        """Write one record of what is nowhere else; the lock is held."""
        try:
            write(request_id, payload)
        except OSError as error:
            raise LedgerFullError(
                f"{len(self._pending)} rows wait for {self.name} to be writable, and no more fit the journal: {error}"
            ) from error

    def _check_room(self, spool: Spool) -> None:
        if spool.spilled_bytes >= self._options.max_journal_bytes:
            raise LedgerFullError(f"{spool.spilled_bytes} bytes of journal wait for {self.name} to be writable")

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything accepted so far is committed and synced; ``False`` when that took too long."""
        with self._lock:
            target = self._counters["accepted"]
            self._hurry.set()
            return self._wake.wait_for(
                lambda: self._counters["committed"] + self._counters["lost"] >= target, timeout_s
            )

    def status(self) -> LedgerStatus:
        """Return the counters."""
        with self._lock:
            spilled = 0 if self._spool is None else self._spool.spilled_rows
            return LedgerStatus(
                **self._counters,
                pending=len(self._pending) + self._in_flight + spilled,
                spilled=spilled,
                spilled_bytes=0 if self._spool is None else self._spool.spilled_bytes,
                failing_since_ns=self._failing_since_ns,
            )

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
        self._thread.join(timeout_s + self._database.patience_s + 1)
        status = self.status()
        if self._follower is not None:
            self._follower.catch_up()
        with self._lock:
            self._thread = None
            if self._spool is not None:
                self._spool.close(self._done, keep=bool(status.pending) or self._spool.has_admitted)
                self._spool, self._done = None, []
        if status.pending:
            lost = min(status.journal_failures, status.pending)
            raise LedgerError(
                f"{status.pending} rows could not be written to {self.name}; they are kept in "
                f"{self._database.journal_dir}" + (f", but up to {lost} of them were in memory only" if lost else "")
            )

    def rows(self, where: RowFilter = ALL_ROWS) -> Iterator[LedgerRow]:
        """Go through the committed rows. Raises ``LedgerError``."""
        with LedgerReader(self._database) as reader:
            yield from reader.rows(where)

    def totals(self, where: RowFilter = ALL_ROWS) -> list[Totals]:
        """Sum the committed rows, one total for each currency. Raises ``LedgerError``."""
        with LedgerReader(self._database) as reader:
            return reader.totals(where)

    # The writer thread.

    def _run(self) -> None:
        try:
            while self._wait_for_rows():
                if not self._write_some():
                    break
        finally:
            if not self._closing:
                log.critical(
                    "the writer of ledger %s has died; rows gather in %s", self.name, self._database.journal_dir
                )
            self._disconnect()

    def _wait_for_rows(self) -> bool:
        """Return when there are rows to write; ``False`` when the ledger is closed and there are none."""
        while True:
            with self._lock:
                if not self._waits() and not self._closing:
                    self._wake.wait(self._options.adopt_interval_s)
                if self._waits():
                    break
                if self._closing:
                    return False
            self._tidy()
        self._hurry.wait(self._options.commit_window_s)
        return True

    def _waits(self) -> bool:
        return bool(self._pending) or (self._spool is not None and self._spool.spilled_rows > 0)

    def _write_some(self) -> bool:
        """Commit what waits in memory, up to a group, then one file of what waits on disk; ``False``: closed before."""
        spool = self._spool
        if spool is None:  # ``close`` has given up on this thread
            return False
        spool.prepare_spare(self._lock)
        with self._lock:
            limit = self._options.max_group_rows
            group, self._pending = self._pending[:limit], self._pending[limit:]
            self._in_flight = len(group)
            if not self._waits() and not self._closing:
                self._hurry.clear()
            if not self._pending:
                self._let_go(spool)
        if group and not self._write_until_done(group):
            return False
        return spool.spilled_rows == 0 or self._unspill(spool)

    def _let_go(self, spool: Spool) -> None:
        try:
            spool.all_taken()
        except OSError as error:
            log.error("journal of ledger %s: %s", self.name, error)

    def _unspill(self, spool: Spool) -> bool:
        """Commit the rows of the oldest file that are nowhere else; ``False``: the ledger closed before it could."""
        try:
            with self._lock:
                oldest = spool.oldest_spilled()
            payloads, damaged_bytes = ([], 0) if oldest is None else oldest[0].read()
        except OSError as error:
            log.error("journal of ledger %s: %s", self.name, error)
            return not self._closing
        if oldest is None:
            return True
        segment, expected = oldest
        entries = [decode(payload) for payload in payloads]
        rows = [entry.values for entry in entries if not entry.is_admission]
        for start in range(0, len(rows), self._options.max_group_rows):
            if not self._write_until_done(rows[start : start + self._options.max_group_rows], is_spilled=True):
                return False
        with self._lock:
            spool.drop_oldest_spilled()
            self._count(lost=expected - len(rows), damaged_bytes=damaged_bytes)
            self._wake.notify_all()
        if len(rows) < expected:
            log.critical("journal %s is damaged: %d rows are lost", segment.path, expected - len(rows))
            segment.set_aside()
        else:
            self._forget([segment])
        return True

    def _write_until_done(self, group: Sequence[Values], *, is_spilled: bool = False) -> bool:
        """Commit a group, again and again if need be; ``False`` when the ledger closes before it could.

        ``is_spilled``: its rows come from the journal, not from memory.
        """
        pause = self._options.retry_s
        while True:
            try:
                duplicates = self._write(group)
                break
            except LedgerError as error:
                self._failed(error)
            if self._closing and time.monotonic() + pause > self._close_by:
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._options.max_retry_s)
        with self._lock:
            self._succeeded()
            done = [] if is_spilled or self._spool is None else self._spool.take_sealed()
        self._forget(done)
        with self._lock:
            self._count(committed=len(group), duplicates=duplicates)
            if not is_spilled:
                self._in_flight = 0
            self._wake.notify_all()
        self._unrolled += len(group)
        if time.monotonic() >= self._adopt_at:
            self._tidy()
        elif self._unrolled >= ADVANCE_ROWS:
            self._roll_up()
        return True

    def _forget(self, done: list[Segment]) -> None:
        """Remove files: where somebody follows, those before these, since of all in them it has been told by now."""
        if self._follower is None:
            going = done
        else:
            going, self._done = self._done, done
            if going:
                self._follower.catch_up()
        for segment in going:
            try:
                segment.remove()
            except OSError as error:  # it is imported again some day, and found to be there already
                log.error("journal %s cannot be removed: %s", segment.path, error)

    def _succeeded(self) -> None:
        """End an alarm; the lock is held."""
        if self._failing_since_ns is not None:
            log.warning("ledger %s can be written again", self.name)
            self._failing_since_ns = None

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self._failing_since_ns is None:
                log.error("ledger %s cannot be written: %s; trying until it can", self.name, error)
                self._failing_since_ns = time.time_ns()
            self._count(write_failures=1)
        self._disconnect()  # whatever broke may have broken the connection

    def _write(self, group: Sequence[Values], *, only_if_absent: bool = False) -> int:
        """Commit a group and sync it; return how many of its rows were already there."""
        written = write_group(self._connected(), group, only_if_absent=only_if_absent)
        for request_id in written.conflicts:
            log.error("ledger %s: a second, different row came for %s; the first stands", self.name, request_id)
        for request_id, reason in written.refused:
            log.error("ledger %s: the row of %s cannot be held: %s", self.name, request_id, reason)
        with self._lock:
            self._count(conflicts=len(written.conflicts), refused=len(written.refused))
        return written.duplicates

    def _count(self, **by: int) -> None:
        """Add to the counters; the lock is held."""
        for name, number in by.items():
            self._counters[name] += number

    # The connection, and what is done beside writing.

    def _connected(self) -> LedgerSession:
        """Return the session; a new one first stores the price versions that wait in the journal folder."""
        if self._session is None:
            self._session = self._database.open()
            price_store.store_left(self._session, self._database.journal_dir)
        return self._session

    def _disconnect(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _connect_at_start(self) -> None:
        """Import what there is, unless others keep the database busy or a server is away: then the writer does it."""
        try:
            self._connected()
        except LedgerUnavailable as error:
            if not self._database.may_be_away:
                raise
            self._failed(error)
            return
        try:
            self._adoption.run(self._count_adopted)
        except LedgerUnavailable as error:
            log.warning("ledger %s: journals of dead processes are imported later: %s", self.name, error)

    def _tidy(self) -> None:
        """Import what dead processes left, bring the rollups up."""
        self._adopt_at = time.monotonic() + self._options.adopt_interval_s
        try:
            self._connected()
            self._adoption.run(self._count_adopted)
        except (OSError, LedgerError) as error:
            self._failed(error)
        else:
            with self._lock:
                self._succeeded()
            self._forget([])
            self._roll_up()

    def _count_adopted(self, adopted: Adopted) -> None:
        with self._lock:
            self._count(recovered=adopted.recovered, died_in_flight=adopted.died, damaged_bytes=adopted.damaged_bytes)

    def _roll_up(self) -> None:
        """Bring the rollups up until there is something better to do. They may lag: reports read the rows beyond."""
        self._unrolled = 0
        try:
            while advance(self._connected()) and not self._pending:
                pass
        except LedgerError as error:
            self._failed(error)
