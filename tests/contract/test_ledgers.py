"""What every ledger keeps, in a file and in a server: one suite over both."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from billing.calendar import HOUR_NS
from billing.corrections import correct
from billing.counters import DIMENSIONS as COUNTED
from billing.counters import LedgerCounters
from billing.database import LedgerDatabase, LedgerSession, database_at
from billing.entry import entry_of
from billing.errors import LedgerError, LedgerFullError, LedgerUnavailable, PeriodError, RowsRemoved
from billing.group import write_group
from billing.journal import Segment
from billing.ledger import Ledger, LedgerOptions
from billing.ledger_read import LedgerReader, RowFilter
from billing.periods import close_period, closings, post
from billing.postgres.database import postgres_database
from billing.prices import PriceBook
from billing.reports import DIMENSIONS, build_report
from billing.retention import month_start_ns, remove_rows
from billing.rollup import advance, watermark
from billing.row import LedgerRow, columns, row_of, row_values
from billing.verify import verify_ledger
from tests.samples.billed import START_NS, altered, billed, died_in_flight, many, unpriced
from tests.samples.postgres import Server
from tracing.record import RequestRecord, Stamps

QUICK = LedgerOptions(commit_window_s=0.001, retry_s=0.001, max_retry_s=0.01, adopt_interval_s=0.01)
EURO = PriceBook.from_toml(
    'name = "e"\ncurrency = "EUR"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
)
DEARER = PriceBook.from_toml(
    'name = "d"\ncurrency = "USD"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
)
DAY_NS = 24 * HOUR_NS
FIRST_HOUR_NS = START_NS // HOUR_NS * HOUR_NS
LATER_NS = START_NS + 400 * DAY_NS


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerDatabase:
    if request.param == "sqlite":
        return database_at(tmp_path / "ledger.sqlite3")
    server: Server = request.getfixturevalue("postgres")
    return postgres_database(server.database(), tmp_path / "journal")


def fill(database: LedgerDatabase, records: list[RequestRecord]) -> None:
    with Ledger(database, QUICK) as ledger:
        for book in (PriceBook.default(), EURO, DEARER):
            ledger.register(book)
        for record in records:
            ledger.append(record)


def stored(database: LedgerDatabase, where: RowFilter = RowFilter()) -> list[LedgerRow]:  # noqa: B008
    with LedgerReader(database) as reader:
        return list(reader.rows(where))


def spread(number: int) -> RequestRecord:
    """Requests over five days, two currencies, with and without a price, some without labels or a run."""
    make = (billed, billed, unpriced, died_in_flight)[number % 4]
    record = make(number, EURO if number % 5 == 0 else PriceBook.default())
    at_ns = FIRST_HOUR_NS + number * HOUR_NS
    labels = {} if number % 3 == 0 else {"step_name": f"s{number % 2}", "agent": "a"}
    return altered(
        record,
        stamps=Stamps(at_ns, closed_ns=at_ns),
        labels=labels,
        link=None if number % 7 == 0 else record.link,
    )


class TestRows:
    def test_a_row_comes_back_as_it_went_in(self, database: LedgerDatabase) -> None:
        records = [*many(20), unpriced(20, PriceBook.default()), died_in_flight(21, PriceBook.default())]
        fill(database, records)
        assert stored(database) == [row_of(record) for record in records]
        period = RowFilter(since_ns=START_NS + 5 * 10**9, until_ns=START_NS + 8 * 10**9)
        assert [row.request_id for row in stored(database, period)] == ["req-5", "req-6", "req-7"]
        assert len(stored(database, RowFilter(run_id="run-1"))) == 10
        assert [row.step for row in stored(database, RowFilter(request_id="req-12"))] == [3]

    def test_the_same_again_is_counted_and_another_under_its_id_is_an_alarm(self, database: LedgerDatabase) -> None:
        records = many(5)
        with Ledger(database, QUICK) as ledger:
            ledger.register(PriceBook.default())
            for record in (*records, records[2], records[2]):
                ledger.append(record)
            assert ledger.flush()
            assert (ledger.status().duplicates, ledger.status().conflicts) == (2, 0)
            ledger.append(altered(billed(9, PriceBook.default()), request_id="req-1"))
            assert ledger.flush()
            assert ledger.status().conflicts == 1
        assert stored(database) == [row_of(record) for record in records]

    def test_writers_at_once_leave_each_row_once(self, database: LedgerDatabase) -> None:
        records = many(120)

        def write(offset: int) -> None:
            with Ledger(database, QUICK) as ledger:
                for record in records[offset : offset + 60]:
                    ledger.append(record)

        Ledger(database, QUICK).start().close()
        threads = [threading.Thread(target=write, args=(offset,)) for offset in (0, 20, 40, 60, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(row.request_id for row in stored(database)) == sorted(record.request_id for record in records)

    def test_what_the_table_cannot_hold_lies_aside_and_harms_no_other(self, database: LedgerDatabase) -> None:
        huge = altered(billed(1, PriceBook.default()), gateway_prompt_tokens=2**63)
        fill(database, [billed(0, PriceBook.default()), huge, billed(2, PriceBook.default())])
        assert [row.request_id for row in stored(database)] == ["req-0", "req-2"]
        assert "could not be held" in verify_ledger(database).faults[0]

    @pytest.mark.parametrize("text", ["half \ud83d", "nul \0 in it", "\u202e"])
    def test_no_text_of_a_client_stops_a_bill(self, database: LedgerDatabase, text: str) -> None:
        record = altered(billed(1, PriceBook.default()), model=text, labels={"agent": text, "step_name": text})
        fill(database, [record, *many(3)])
        assert len(stored(database)) == 3
        with LedgerReader(database) as reader:
            assert sum(group.sums.requests for group in reader.report(("label:step_name", "model")).groups) == 3

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE requests SET amount_nano = 0",
            "DELETE FROM requests",
            "UPDATE prices SET body = ''",
            "DELETE FROM prices",
            "DELETE FROM closings",
        ],
    )
    def test_nothing_is_changed_or_deleted(self, database: LedgerDatabase, statement: str) -> None:
        fill(database, many(2))
        close_period(database, START_NS, LATER_NS)
        session = database.open()
        with pytest.raises(LedgerError, match="append-only"), session.writing():
            session.execute(statement)
        session.close()
        assert len(stored(database)) == 2


class TestReports:
    @pytest.fixture(params=[0, 30, 120], ids=lambda folded: f"{folded} of 120 folded")
    def filled(self, request: pytest.FixtureRequest, database: LedgerDatabase) -> LedgerDatabase:
        session = database.open()
        write_group(session, [row_values(spread(number)) for number in range(120)])
        while request.param and advance(session, 10) and watermark(session) < request.param:
            pass
        session.close()
        return database

    def test_every_dimension_is_the_sum_of_the_rows(self, filled: LedgerDatabase) -> None:
        with LedgerReader(filled) as reader:
            rows = list(reader.rows())
            several = [("day", "team", "hour"), ("model", "month"), ("run", "team"), ("step", "day"), ("run", "hour")]
            labels = [("label:step_name",), ("label:step_name", "day"), ("team", "label:agent"), ("label:none",)]
            for by in ((), *((name,) for name in DIMENSIONS), *several, *labels, ("label:agent", "label:step_name")):
                assert reader.report(by) == build_report(rows, by), by

    def test_every_cut(self, filled: LedgerDatabase) -> None:
        with LedgerReader(filled) as reader:
            for since in (None, 0, HOUR_NS, DAY_NS + 1, DAY_NS + HOUR_NS // 2):
                for until in (None, 2 * HOUR_NS, DAY_NS + HOUR_NS // 3, 2 * DAY_NS, 4 * DAY_NS - 1):
                    where = RowFilter(
                        since_ns=None if since is None else FIRST_HOUR_NS + since,
                        until_ns=None if until is None else FIRST_HOUR_NS + until,
                    )
                    for by in (("team", "hour"), ("model",), ("run",), ("label:step_name", "day")):
                        assert reader.report(by, where) == build_report(reader.rows(where), by), (by, where)
            for where in (RowFilter(run_id="run-3"), RowFilter(request_id="req-44"), RowFilter(run_id="none")):
                assert reader.report(("step", "team"), where) == build_report(reader.rows(where), ("step", "team"))

    def test_counters_equal_the_report_whenever_they_began(self, database: LedgerDatabase) -> None:
        fill(database, many(30))
        counters = LedgerCounters(database)

        def check() -> None:
            with LedgerReader(database) as reader:
                report = reader.report(COUNTED)
            assert counters.refresh() == {(group.key, group.currency): group.sums for group in report.groups}

        check()
        fill(database, [unpriced(number, PriceBook.default()) for number in range(30, 40)])
        check()
        counters.close()


class TestAccounts:
    def test_a_correction_is_a_new_row_and_verifies(self, database: LedgerDatabase) -> None:
        fill(database, many(12))
        with LedgerReader(database) as reader:
            history = reader.history("req-3")
        row = correct(history, DEARER, reason="wrong book", at_ns=LATER_NS)
        assert row is not None
        assert post(database, [row]) == 1
        assert post(database, [row]) == 0
        with pytest.raises(PeriodError, match="req-3"):
            post(database, [replace(row, amount_nano=1)])
        assert stored(database, RowFilter(request_id="req-3")) == [*history, row]
        assert verify_ledger(database).faults == []
        with LedgerReader(database) as reader:
            assert reader.report(("team",)) == build_report(reader.rows(), ("team",))

    def test_a_closed_period_keeps_its_sums_and_later_rows_are_posted_after_it(self, database: LedgerDatabase) -> None:
        fill(database, many(12))
        until = START_NS + 6 * 10**9
        closing = close_period(database, until, LATER_NS)
        assert [total.requests for total in closing.totals] == [6]
        with pytest.raises(PeriodError, match="already"):
            close_period(database, until, LATER_NS)
        late = altered(billed(2, PriceBook.default()), request_id="late")
        fill(database, [late, many(3)[2]])
        assert stored(database, RowFilter(request_id="late")) == [replace(row_of(late), posted_ns=until)]
        with LedgerReader(database) as reader:
            assert closings(reader) == [closing]
            assert tuple(reader.totals(RowFilter(until_ns=until))) == closing.totals
        assert verify_ledger(database).faults == []
        session = database.open()
        named = ", ".join(name for name in columns() if name != "request_id")
        with pytest.raises(LedgerError, match="the period is closed"), session.writing():
            session.execute(
                f"INSERT INTO requests (request_id, {named})"
                f" SELECT 'x', {named} FROM requests WHERE request_id = 'req-0'"
            )
        session.close()


class TestRetention:
    BEFORE_NS = month_start_ns(START_NS + 40 * DAY_NS, 0)  # a month later than the first rows

    @pytest.fixture
    def aged(self, database: LedgerDatabase) -> LedgerDatabase:
        """80 requests over 80 days, labelled, closed up to the second month."""
        records = []
        for number in range(80):
            at_ns = FIRST_HOUR_NS + number * DAY_NS
            records.append(altered(spread(number), stamps=Stamps(at_ns, closed_ns=at_ns)))
        fill(database, records)
        close_period(database, self.BEFORE_NS, LATER_NS)
        return database

    def test_rows_go_and_sums_stay(self, aged: LedgerDatabase) -> None:
        kept = [row for row in stored(aged) if row.posted_ns >= self.BEFORE_NS]
        asked = [(), ("team",), ("hour", "model"), ("run",), ("label:step_name", "day")]
        with LedgerReader(aged) as reader:
            before, totals = [reader.report(by) for by in asked], reader.totals()
        removal, rows = remove_rows(aged, self.BEFORE_NS, LATER_NS)
        assert rows == 80 - len(kept) > 0
        assert sum(total.requests for total in removal.totals) == rows
        assert stored(aged) == kept
        with LedgerReader(aged) as reader:
            assert [reader.report(by) for by in asked] == before
            assert reader.totals() == totals
            since = RowFilter(since_ns=self.BEFORE_NS)
            assert reader.report(("run", "team"), since) == build_report(kept, ("run", "team"))
            for by, where in (
                (("run", "team"), RowFilter()),
                (("team",), RowFilter(until_ns=self.BEFORE_NS - 1)),
                (("run",), RowFilter(since_ns=FIRST_HOUR_NS + HOUR_NS)),
            ):
                with pytest.raises(RowsRemoved):
                    reader.report(by, where)
        assert verify_ledger(aged).faults == []
        close_period(aged, LATER_NS, LATER_NS)
        assert verify_ledger(aged).faults == []
        assert remove_rows(aged, self.BEFORE_NS, LATER_NS)[1] == 0

    def test_a_row_that_comes_back_after_its_month_is_gone_is_not_billed_twice(self, aged: LedgerDatabase) -> None:
        remove_rows(aged, self.BEFORE_NS, LATER_NS)
        with Ledger(aged, QUICK) as ledger:
            at_ns = FIRST_HOUR_NS
            ledger.append(altered(spread(0), stamps=Stamps(at_ns, closed_ns=at_ns)))
            assert ledger.flush()
            assert ledger.status().refused == 1
        assert "lie in its neighbour" in verify_ledger(aged).faults[0]

    def test_what_is_open_stays(self, aged: LedgerDatabase) -> None:
        with pytest.raises(PeriodError, match="not closed"):
            remove_rows(aged, month_start_ns(self.BEFORE_NS + 40 * DAY_NS, 0), LATER_NS)
        with pytest.raises(PeriodError, match="first instant of a month"):
            remove_rows(aged, self.BEFORE_NS + 1, LATER_NS)
        session = aged.open()
        with pytest.raises(LedgerError, match="not closed"), session.writing():
            session.execute(f"INSERT INTO removals VALUES ({LATER_NS}, 0, '[]')")
        with suppress(LedgerError):  # one refuses, the other finds nothing that may go
            assert session.remove_rows(LATER_NS) == 0
        session.close()
        assert len(stored(aged)) == 80


class Follows:
    def __init__(self, told: list[LedgerRow]) -> None:
        self.told = told

    def recovered(self, rows: Sequence[LedgerRow]) -> None:
        self.told += rows

    def catch_up(self) -> None:
        pass


class TestJournal:
    def test_what_a_dead_process_left_is_imported_and_told(self, database: LedgerDatabase) -> None:
        book, told = PriceBook.default(), list[LedgerRow]()
        Ledger(database, QUICK).start().close()
        dead = Segment(database.journal_dir)
        for number in range(3):
            dead.append(entry_of(row_values(died_in_flight(number, book)), is_admission=True)[1])
        dead.append(entry_of(row_values(billed(1, book)))[1])
        dead.close()
        with Ledger(database, QUICK, follower=Follows(told)) as ledger:
            ledger.register(book)
            assert (ledger.status().recovered, ledger.status().died_in_flight) == (1, 2)
        right = [row_of(billed(1, book)), row_of(died_in_flight(0, book)), row_of(died_in_flight(2, book))]
        assert sorted(stored(database), key=lambda row: row.request_id) == sorted(right, key=lambda r: r.request_id)
        assert sorted(told, key=lambda row: row.request_id) == sorted(right, key=lambda row: row.request_id)
        assert verify_ledger(database).faults == []

    def test_a_journal_of_another_kind_is_left_alone(self, database: LedgerDatabase) -> None:
        Ledger(database, QUICK).start().close()
        segment = Segment(database.journal_dir)
        segment.append(b"\xc1")
        segment.close()
        with pytest.raises(LedgerError, match="journal"):
            Ledger(database, QUICK).start()
        assert segment.path.exists()


class Away:
    """A database that can be cut off: as if the network to it were."""

    def __init__(self, inner: LedgerDatabase) -> None:
        self.inner, self.is_away = inner, False
        self.name, self.journal_dir, self.patience_s, self.may_be_away = "away", inner.journal_dir, 0.0, True

    def open(self) -> LedgerSession:
        if self.is_away:
            raise LedgerUnavailable("cut off")
        session = self.inner.open()
        writing = session.writing

        @contextmanager
        def cut() -> Iterator[None]:
            if self.is_away:
                raise LedgerUnavailable("cut off")
            with writing():
                yield

        session.writing = cut  # type: ignore[method-assign]
        return session

    def open_readonly(self) -> LedgerSession:
        return self.inner.open_readonly()

    def version(self) -> str | None:
        return self.inner.version()

    def migrate(self, grant_to: str | None = None) -> tuple[str | None, str]:
        return self.inner.migrate(grant_to)


class TestAway:
    SMALL = replace(QUICK, max_memory_rows=10, segment_bytes=4096, max_group_rows=7)

    def test_rows_wait_on_disk_and_all_arrive_once(self, database: LedgerDatabase) -> None:
        away = Away(database)
        records = many(300)
        with Ledger(away, self.SMALL) as ledger:
            ledger.register(PriceBook.default())
            ledger.append(records[0])
            assert ledger.flush()
            away.is_away = True
            for number, record in enumerate(records[1:250]):
                ledger.admit(died_in_flight(1 + number, PriceBook.default()))
                ledger.append(record)
            ledger.admit(died_in_flight(250, PriceBook.default()))
            assert not ledger.flush(0.02)
            status = ledger.status()
            assert status.pending == 249
            assert status.spilled == 249 - 10
            assert status.spilled_bytes > 0
            assert status.failing_since_ns is not None
            away.is_away = False
            for record in records[250:]:
                ledger.append(record)
            assert ledger.flush(30)
            while ledger.status().spilled_bytes:  # the last file goes after its commit
                ledger.flush(0.01)
            status = ledger.status()
            assert (status.pending, status.spilled) == (0, 0)
            assert (status.committed, status.failing_since_ns) == (300, None)
        assert sorted(stored(database), key=lambda row: row.arrived_ns) == [row_of(record) for record in records]
        assert list(database.journal_dir.iterdir()) == []
        assert verify_ledger(database).faults == []

    def test_what_still_waits_at_the_end_is_there_after_the_next_start(self, database: LedgerDatabase) -> None:
        away, records = Away(database), many(60)
        away.is_away = True
        ledger = Ledger(away, self.SMALL).start()  # never saw its database
        ledger.register(PriceBook.default())
        for record in records:
            ledger.append(record)
        with pytest.raises(LedgerError, match="60 rows could not be written"):
            ledger.close(0.05)
        with Ledger(database, QUICK) as again:
            assert again.status().recovered == 60
        assert verify_ledger(database).faults == []  # the price version came along
        assert len(stored(database)) == 60

    def test_a_full_journal_refuses_before_an_engine_works_in_vain(self, database: LedgerDatabase) -> None:
        away, records = Away(database), many(40)
        with Ledger(away, replace(self.SMALL, max_memory_rows=1, max_journal_bytes=3000)) as ledger:
            away.is_away = True
            accepted = 0
            with suppress(LedgerFullError):
                for record in records:
                    ledger.append(record)
                    accepted += 1
            assert 1 < accepted < 39
            with pytest.raises(LedgerFullError):
                ledger.admit(died_in_flight(39, PriceBook.default()))
            away.is_away = False
            assert ledger.flush(30)
            ledger.append(records[39])
        assert len(stored(database)) == accepted + 1

    def test_a_full_disk_refuses_before_an_engine_works_in_vain_and_leaves_no_file_open(
        self, database: LedgerDatabase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: Segment, payload: bytes) -> None:
            raise OSError(28, "No space left on device")

        away, records = Away(database), many(3)
        with Ledger(away, replace(self.SMALL, max_memory_rows=2)) as ledger:
            away.is_away = True
            ledger.admit(died_in_flight(8, PriceBook.default()))
            for record in records[:2]:
                ledger.append(record)
            with monkeypatch.context() as patch:
                patch.setattr(Segment, "append", full)
                files = len(list(database.journal_dir.iterdir()))
                for _ in range(3):
                    with pytest.raises(LedgerFullError):
                        ledger.admit(died_in_flight(9, PriceBook.default()))
                    with pytest.raises(LedgerFullError):
                        ledger.append(records[2])
                assert len(list(database.journal_dir.iterdir())) == files
            away.is_away = False
            assert ledger.flush(30)
            ledger.append(records[2])
        assert len(stored(database)) == 3

    def test_a_damaged_file_is_told_and_kept(self, database: LedgerDatabase, caplog: pytest.LogCaptureFixture) -> None:
        away = Away(database)
        with Ledger(away, replace(QUICK, max_memory_rows=1)) as ledger:
            away.is_away = True
            for record in many(9):
                ledger.append(record)
            (*_, newest) = sorted(database.journal_dir.glob("*.journal"))
            data = bytearray(newest.read_bytes())
            data[-1] ^= 1
            newest.write_bytes(data)
            away.is_away = False
            assert ledger.flush(30)
            while ledger.status().spilled:
                ledger.flush(0.01)
            assert (ledger.status().lost, ledger.status().committed) == (1, 8)
        assert "1 rows are lost" in caplog.text
        assert [path.suffix for path in database.journal_dir.iterdir()] == [".damaged"]
        assert len(stored(database)) == 8
