"""The ledger: each request once, in the database or in the journal, and never silently missing."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from billing import schema
from billing.entry import entry_of
from billing.errors import LedgerClosedError, LedgerError, LedgerFullError
from billing.journal import Segment, adopt
from billing.ledger import Ledger, LedgerOptions
from billing.ledger_read import LedgerReader, RowFilter
from billing.prices import PriceBook
from billing.reports import build_report
from billing.row import LedgerRow, columns, row_of, row_values
from billing.verify import verify_ledger
from tests.samples.billed import START_NS, altered, billed, many, unpriced
from tracing.record import RequestRecord, Usage, UsageSource

QUICK = LedgerOptions(commit_window_s=0.001, retry_s=0.001, max_retry_s=0.01, adopt_interval_s=0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite3"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger(path, QUICK) as opened:
        opened.register(PriceBook.default())
        yield opened


def stored_ids(path: Path) -> list[str]:
    with LedgerReader(path) as reader:
        return [row.request_id for row in reader.rows()]


def journals(path: Path) -> list[Path]:
    return sorted(path.with_name(path.name + ".journal").iterdir())


def fill(ledger: Ledger, records: list[RequestRecord]) -> None:
    for record in records:
        ledger.append(record)
    assert ledger.flush()


class TestRows:
    def test_a_row_holds_all_of_the_record_that_a_bill_needs(self, ledger: Ledger) -> None:
        record = billed(7, PriceBook.default())
        fill(ledger, [record])
        (row,) = ledger.rows()
        assert row == row_of(record)
        assert row.usage() == record.usage
        assert row.charge() == record.charge
        assert row.attempt_list() == list(record.attempts)
        assert (row.team, row.run_id, row.step, row.instance) == ("team-1", "run-0", 8, "engine-1")
        assert (row.agent, row.label("step_name"), row.label("none")) == ("agent-3", "plan", None)

    def test_rows_by_period_run_and_request(self, ledger: Ledger) -> None:
        fill(ledger, many(20))
        second = 10**9
        period = RowFilter(since_ns=START_NS + 5 * second, until_ns=START_NS + 8 * second)
        assert [row.request_id for row in ledger.rows(period)] == ["req-5", "req-6", "req-7"]
        assert len(list(ledger.rows(RowFilter(run_id="run-1")))) == 10
        assert [row.step for row in ledger.rows(RowFilter(request_id="req-12"))] == [3]

    def test_totals_are_the_sums_of_the_rows_by_currency(self, ledger: Ledger) -> None:
        euro = PriceBook.from_toml(
            'name = "e"\ncurrency = "EUR"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
        )
        ledger.register(euro)
        records = [*many(30), unpriced(30, PriceBook.default()), billed(31, euro)]
        fill(ledger, records)
        dollars = [record for record in records if record.charge.currency == "USD"]
        in_euro, in_dollars = ledger.totals()
        assert (in_euro.currency, in_euro.amount_nano) == ("EUR", records[-1].charge.amount_nano)
        assert in_dollars.amount_nano == sum(record.charge.amount_nano or 0 for record in dollars)
        assert in_dollars.saved_nano == sum(record.charge.saved_nano or 0 for record in dollars)
        assert in_dollars.prompt_tokens == sum(record.usage.prompt_tokens for record in dollars)
        assert in_dollars.hit_tokens == sum(record.usage.hit_tokens for record in dollars)
        assert (in_dollars.requests, in_dollars.unpriced) == (31, 1)

    def test_text_that_has_no_bytes_is_stored_all_the_same(self, ledger: Ledger) -> None:
        record = altered(billed(1, PriceBook.default()), model="half \ud83d", labels={"agent": "\udead"})
        fill(ledger, [record])
        assert next(iter(ledger.rows())).model == "half ?"


class TestOnce:
    def test_the_same_request_again_is_counted_and_changes_nothing(self, ledger: Ledger, path: Path) -> None:
        records = many(5)
        fill(ledger, records)
        fill(ledger, [records[2], records[2]])
        assert stored_ids(path) == [record.request_id for record in records]
        status = ledger.status()
        assert (status.duplicates, status.conflicts, status.committed) == (2, 0, 7)

    def test_a_different_row_under_the_same_id_is_an_alarm(
        self, ledger: Ledger, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = billed(1, PriceBook.default())
        fill(ledger, [first])
        fill(ledger, [altered(billed(2, PriceBook.default()), request_id=first.request_id)])
        assert ledger.status().conflicts == 1
        assert first.request_id in caplog.text
        assert next(iter(ledger.rows())) == row_of(first)

    def test_threads_that_send_overlapping_requests_leave_each_once(self, ledger: Ledger, path: Path) -> None:
        records = many(120)

        def send(offset: int) -> None:
            for record in records[offset : offset + 60]:
                ledger.append(record)

        threads = [threading.Thread(target=send, args=(offset,)) for offset in (0, 20, 40, 60, 0, 60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ledger.flush()
        assert sorted(stored_ids(path)) == sorted(record.request_id for record in records)
        assert ledger.status().duplicates == 6 * 60 - 120

    def test_two_writers_share_one_ledger(self, ledger: Ledger, path: Path) -> None:
        records = many(40)
        with Ledger(path, QUICK) as other:
            for mine, theirs in zip(records[:30], records[10:], strict=True):
                ledger.append(mine)
                other.append(theirs)
            assert ledger.flush()
            assert other.flush()
        assert sorted(stored_ids(path)) == sorted(record.request_id for record in records)

    def test_the_tables_are_append_only(self, ledger: Ledger, path: Path) -> None:
        fill(ledger, many(1))
        connection = sqlite3.connect(path)
        for statement in ("UPDATE requests SET amount_nano = 0", "DELETE FROM requests", "DELETE FROM prices"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)
        connection.close()


class TestFailure:
    @pytest.fixture
    def locked(self, ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
        """Someone else holds the database for writing, and the writer does not wait long."""
        monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.01)
        fill(ledger, many(1))
        assert ledger._session is not None
        ledger._session.query("PRAGMA busy_timeout = 10")
        holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        yield holder
        holder.close()

    @staticmethod
    def wait_for_failure(ledger: Ledger) -> None:
        while not ledger.status().write_failures:
            ledger.flush(0.01)

    def test_a_failed_write_is_an_alarm_and_is_tried_until_it_succeeds(
        self, ledger: Ledger, path: Path, locked: sqlite3.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        ledger.append(billed(1, PriceBook.default()))
        self.wait_for_failure(ledger)
        status = ledger.status()
        assert (status.pending, status.failing_since_ns is not None) == (1, True)
        assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
        locked.execute("ROLLBACK")
        assert ledger.flush()
        status = ledger.status()
        assert (status.pending, status.failing_since_ns) == (0, None)
        assert stored_ids(path) == ["req-0", "req-1"]

    def test_rows_beyond_the_limit_are_refused_loudly(
        self, path: Path, ledger: Ledger, locked: sqlite3.Connection
    ) -> None:
        with Ledger(path, replace(QUICK, max_memory_rows=1, max_journal_bytes=1000)) as small:
            records = many(5)
            for record in records[1:4]:
                small.append(record)
            with pytest.raises(LedgerFullError):
                small.append(records[4])
            locked.execute("ROLLBACK")
            assert small.flush()
            small.append(records[4])
        assert len(stored_ids(path)) == 5

    def test_closing_over_a_database_that_cannot_be_written_keeps_the_rows(
        self, ledger: Ledger, path: Path, locked: sqlite3.Connection
    ) -> None:
        for record in many(4)[1:]:
            ledger.append(record)
        with pytest.raises(LedgerError, match="3 rows could not be written"):
            ledger.close(timeout_s=0.05)
        assert len(journals(path)) == 1
        locked.execute("ROLLBACK")
        with Ledger(path, QUICK) as again:
            assert again.status().recovered == 3
            assert stored_ids(path) == ["req-0", "req-1", "req-2", "req-3"]

    def test_a_journal_that_cannot_be_written_is_an_alarm_and_the_row_still_arrives(
        self, ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(self: Segment, payload: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Segment, "append", full)
        fill(ledger, many(1))
        assert ledger.status().journal_failures == 1
        assert "No space left" in caplog.text
        assert stored_ids(path) == ["req-0"]

    def test_a_row_that_the_table_cannot_hold_harms_no_other(self, ledger: Ledger, path: Path) -> None:
        huge = altered(billed(1, PriceBook.default()), gateway_prompt_tokens=2**63)
        fill(ledger, [billed(0, PriceBook.default()), huge, billed(2, PriceBook.default())])
        assert stored_ids(path) == ["req-0", "req-2"]
        assert ledger.status().refused == 1
        assert "could not be held" in verify_ledger(path).faults[0]

    def test_a_number_beyond_any_ledger_is_an_error(self, ledger: Ledger) -> None:
        with pytest.raises(LedgerError, match="req-1"):
            ledger.append(altered(billed(1, PriceBook.default()), gateway_prompt_tokens=2**70))

    def test_a_closed_ledger_takes_nothing(self, path: Path) -> None:
        ledger = Ledger(path, QUICK)
        with pytest.raises(LedgerClosedError):
            ledger.append(billed(0, PriceBook.default()))
        ledger.start()
        with pytest.raises(LedgerError, match="already"):
            ledger.start()
        ledger.close()
        ledger.close()
        with pytest.raises(LedgerClosedError):
            ledger.append(billed(0, PriceBook.default()))

    def test_what_is_no_ledger_is_refused(self, tmp_path: Path) -> None:
        other, text, newer = tmp_path / "other.db", tmp_path / "text", tmp_path / "newer.db"
        sqlite3.connect(other).execute("CREATE TABLE t (x)").connection.close()
        text.write_text("no database at all, only some text that is longer than a header of SQLite would be" * 10)
        Ledger(newer, QUICK).start().close()
        connection = sqlite3.connect(newer)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
        for path in (other, text, newer):
            with pytest.raises(LedgerError, match=path.name):
                Ledger(path, QUICK).start()
            with pytest.raises(LedgerError, match=path.name):
                LedgerReader(path)
        with pytest.raises(LedgerError, match="there is no ledger"):
            LedgerReader(tmp_path / "absent.db")


class TestJournal:
    def test_an_orderly_close_leaves_none(self, path: Path) -> None:
        with Ledger(path, QUICK) as ledger:
            fill(ledger, many(3))
            assert len(journals(path)) == 1
        assert journals(path) == []

    def test_a_full_file_is_sealed_and_goes_after_the_commit(self, path: Path) -> None:
        with Ledger(path, replace(QUICK, segment_bytes=1)) as ledger:
            first = journals(path)
            fill(ledger, many(3))
            assert first != journals(path)
            assert len(journals(path)) == 1

    def test_a_living_process_keeps_its_journal(self, tmp_path: Path) -> None:
        segment = Segment(tmp_path)
        segment.append(b"mine")
        assert list(adopt(tmp_path)) == []
        segment.close()
        assert [list(orphan.payloads()) for orphan in adopt(tmp_path)] == [[b"mine"]]
        assert list(tmp_path.iterdir()) == []

    def test_a_torn_record_ends_the_journal_and_is_kept_for_inspection(self, tmp_path: Path) -> None:
        segment = Segment(tmp_path)
        segment.append(b"whole")
        segment.append(b"torn apart")
        segment.close()
        data = segment.path.read_bytes()
        for cut in range(len(data) - len(b"torn apart") - 12 + 1, len(data)):
            segment.path.write_bytes(data[:cut])
            ((payloads, orphan),) = [(list(orphan.payloads()), orphan) for orphan in adopt(tmp_path)]
            assert payloads == [b"whole"]
            assert orphan.damaged_bytes > 0
            assert [path.suffix for path in tmp_path.iterdir()] == [".damaged"]

    def test_a_changed_byte_is_noticed(self, tmp_path: Path) -> None:
        segment = Segment(tmp_path)
        segment.append(b"some payload")
        segment.close()
        data = bytearray(segment.path.read_bytes())
        data[-1] ^= 1
        segment.path.write_bytes(data)
        ((payloads, orphan),) = [(list(orphan.payloads()), orphan) for orphan in adopt(tmp_path)]
        assert payloads == []
        assert orphan.damaged_bytes == len(data)

    def test_a_short_write_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        segment = Segment(tmp_path)
        segment.append(b"whole")
        real = os.write
        monkeypatch.setattr("billing.journal.os.write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(OSError, match="5 of"):
            segment.append(b"does not fit")
        monkeypatch.undo()
        segment.append(b"again")
        segment.close()
        ((payloads, orphan),) = [(list(orphan.payloads()), orphan) for orphan in adopt(tmp_path)]
        assert (payloads, orphan.damaged_bytes) == ([b"whole", b"again"], 0)

    def test_a_running_ledger_takes_over_the_rows_of_a_dead_one(self, ledger: Ledger, path: Path) -> None:
        orphaned = Ledger(path, QUICK)
        orphaned.start()
        orphaned.close()
        segment = Segment(path.with_name(path.name + ".journal"))
        segment.append(entry_of(row_values(billed(5, PriceBook.default())))[1])
        segment.close()
        while not ledger.status().recovered:
            ledger.flush(0.01)
        assert stored_ids(path) == ["req-5"]

    @pytest.mark.parametrize("payload", [b"\xc1", b"\x92\x63\x90"])
    def test_a_journal_of_another_kind_stops_the_start(self, path: Path, payload: bytes) -> None:
        Ledger(path, QUICK).start().close()
        segment = Segment(path.with_name(path.name + ".journal"))
        segment.append(payload)
        segment.close()
        with pytest.raises(LedgerError, match="journal"):
            Ledger(path, QUICK).start()
        assert segment.path.exists()


class TestVerify:
    def test_every_amount_is_computed_again(self, ledger: Ledger, path: Path) -> None:
        nothing = Usage(source=UsageSource.NONE)
        missing = Usage(output_tokens=3, source=UsageSource.MISSING)
        book = PriceBook.default()
        extra = [unpriced(50, book), billed(51, book, usage=nothing), billed(52, book, usage=missing)]
        fill(ledger, [*many(50), *extra])
        result = verify_ledger(path)
        assert (result.passed, result.rows, result.faults) == (True, 53, [])

    @pytest.mark.parametrize("field", ["amount_nano", "saved_nano"])
    def test_an_amount_that_does_not_follow_is_found(self, ledger: Ledger, path: Path, field: str) -> None:
        record = billed(1, PriceBook.default())
        wrong = structs.replace(record.charge, **{field: 1})
        fill(ledger, [billed(0, PriceBook.default()), altered(record, charge=wrong)])
        result = verify_ledger(path)
        assert (result.passed, result.fault_count) == (False, 1)
        assert "req-1" in result.faults[0]

    def test_a_token_count_that_was_changed_is_found(self, ledger: Ledger, path: Path) -> None:
        record = billed(1, PriceBook.default())
        fill(ledger, [altered(record, usage=structs.replace(record.usage, fresh_tokens=record.usage.fresh_tokens + 1))])
        assert not verify_ledger(path).passed

    def test_a_price_version_that_is_not_stored_is_found(self, path: Path) -> None:
        with Ledger(path, QUICK) as ledger:
            fill(ledger, many(1))
        assert "is not stored" in verify_ledger(path).faults[0]

    def test_a_price_version_that_was_changed_is_found(self, ledger: Ledger, path: Path) -> None:
        fill(ledger, many(1))
        connection = sqlite3.connect(path)
        connection.execute("DROP TRIGGER prices_no_UPDATE")
        connection.execute("UPDATE prices SET body = replace(body, '\"0.08\"', '\"0.09\"')")
        connection.commit()
        connection.close()
        faults = verify_ledger(path).faults
        assert "digest" in faults[0]
        assert "req-0" in faults[1]

    def test_a_charge_without_a_basis_is_found(self, ledger: Ledger, path: Path) -> None:
        record = billed(1, PriceBook.default())
        fill(ledger, [altered(record, charge=structs.replace(record.charge, basis=None))])
        assert "basis" in verify_ledger(path).faults[0]


def test_the_journal_folder_is_private(ledger: Ledger, path: Path) -> None:
    folder = path.with_name(path.name + ".journal")
    assert folder.stat().st_mode & 0o077 == 0
    assert journals(path)[0].stat().st_mode & 0o077 == 0


def test_nothing_is_logged_when_all_is_well(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "keepwarm.billing")
    fill(ledger, many(3))
    assert caplog.text == ""


def test_a_ledger_of_schema_1_is_brought_up_and_its_journal_read(path: Path) -> None:
    new = ("posted_ns", "settles_unpriced")
    records = many(3)
    path.parent.mkdir()
    old = sqlite3.connect(path)
    types = {name: schema._TYPES[str(LedgerRow.__annotations__[name])] for name in columns() if name not in new}
    old.executescript(
        f"""
        CREATE TABLE prices (version TEXT PRIMARY KEY, name TEXT NOT NULL, currency TEXT NOT NULL, body TEXT NOT NULL);
        CREATE TABLE requests (seq INTEGER PRIMARY KEY, {", ".join(f"{n} {t}" for n, t in types.items())},
            UNIQUE (request_id, revision)) STRICT;
        CREATE INDEX requests_arrived ON requests (arrived_ns);
        CREATE TABLE refused (seq INTEGER PRIMARY KEY, request_id TEXT, reason TEXT, payload BLOB);
        CREATE TRIGGER requests_no_UPDATE BEFORE UPDATE ON requests BEGIN SELECT RAISE(ABORT, 'no'); END;
        PRAGMA application_id = {schema.APPLICATION_ID};
        PRAGMA user_version = 1;
        """
    )
    values = [
        tuple(v for name, v in zip(columns(), row_values(record), strict=True) if name not in new) for record in records
    ]
    old.executemany(f"INSERT INTO requests ({', '.join(types)}) VALUES ({', '.join('?' * len(types))})", values[:2])
    old.commit()
    old.close()
    journal = path.with_name(path.name + ".journal")
    journal.mkdir()
    segment = Segment(journal)
    segment.append(msgspec.msgpack.encode((1, values[2])))
    segment.close()
    with Ledger(path, QUICK) as ledger:
        ledger.register(PriceBook.default())
        assert list(ledger.rows()) == [row_of(record) for record in records]
    with LedgerReader(path) as reader:
        assert reader.report(("team",)) == build_report(map(row_of, records), ("team",))
    assert verify_ledger(path).faults == []
