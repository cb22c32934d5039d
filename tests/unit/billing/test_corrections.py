"""Corrections and closed periods: nothing is changed, everything adds up, and verification sees what is wrong."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from billing.corrections import correct, standing
from billing.errors import CorrectionError, LedgerError, PeriodError
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader, RowFilter
from billing.meter import recharge
from billing.periods import close_period, closings, post
from billing.prices import PriceBook
from billing.reports import build_report
from billing.row import LedgerRow, row_of
from billing.verify import verify_ledger
from tests.samples.billed import START_NS, altered, billed, died_in_flight, many, unpriced

LATER_NS = START_NS + 10**15
DEARER = PriceBook.from_toml(
    'name = "d"\ncurrency = "USD"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite3"
    with Ledger(path) as ledger:
        ledger.register(PriceBook.default())
        ledger.register(DEARER)
        for record in (*many(12), unpriced(12, PriceBook.default()), died_in_flight(13, PriceBook.default())):
            ledger.append(record)
    return path


def history(path: Path, number: int) -> list[LedgerRow]:
    with LedgerReader(path) as reader:
        return reader.history(f"req-{number}")


def amount(path: Path) -> int:
    with LedgerReader(path) as reader:
        (total,) = reader.totals()
        (reported,) = reader.report().totals
        assert reported.sums.amount_nano == total.amount_nano
        assert reader.report(("day", "team")) == build_report(reader.rows(), ("day", "team"))
        return total.amount_nano


def test_a_correction_makes_the_request_cost_what_the_right_book_says(path: Path) -> None:
    before, rows = amount(path), history(path, 3)
    row = correct(rows, DEARER, reason="wrong book", at_ns=LATER_NS)
    assert row is not None
    assert post(path, [row]) == 1
    right = recharge(rows[0].usage(), DEARER, rows[0].charge().basis)  # type: ignore[arg-type]
    now = standing(history(path, 3))
    assert (now.amount_nano, now.saved_nano) == (right.amount_nano, right.saved_nano)
    assert now.lines == {line.token_class: (line.quantity, line.amount_nano) for line in right.lines}
    assert now.usage == rows[0].usage()
    assert amount(path) == before + (right.amount_nano or 0) - (rows[0].amount_nano or 0)
    assert (row.revision, row.posted_ns, row.arrived_ns) == (1, LATER_NS, rows[0].arrived_ns)
    assert verify_ledger(path).faults == []
    assert correct(history(path, 3), DEARER, reason="again", at_ns=LATER_NS) is None
    back = correct(history(path, 3), PriceBook.default(), reason="it was right", at_ns=LATER_NS)
    assert back is not None
    post(path, [back])
    assert amount(path) == before
    assert verify_ledger(path).faults == []


def test_counts_are_corrected_with_their_money(path: Path) -> None:
    rows = history(path, 4)
    usage = structs.replace(rows[0].usage(), fresh_tokens=1, output_tokens=rows[0].output_tokens + 5)
    row = correct(rows, PriceBook.default(), reason="recounted", at_ns=LATER_NS, usage=usage)
    assert row is not None
    post(path, [row])
    assert standing(history(path, 4)).usage == usage
    assert row.output_tokens == 5
    assert verify_ledger(path).faults == []


def test_a_request_without_a_price_gets_one_and_is_no_longer_counted_as_unpriced(path: Path) -> None:
    with LedgerReader(path) as reader:
        assert [t.unpriced for t in reader.totals()] == [2]
    for number in (12, 13):
        usage = structs.replace(billed(number, DEARER).usage)
        row = correct(history(path, number), DEARER, reason="priced", at_ns=LATER_NS, usage=usage)
        assert row is not None
        assert row.settles_unpriced == 1
        post(path, [row])
    with LedgerReader(path) as reader:
        assert [(t.unpriced, t.requests) for t in reader.totals()] == [(0, 14)]
        assert reader.report(("team",)) == build_report(reader.rows(), ("team",))
    assert verify_ledger(path).faults == []


def test_what_cannot_be_corrected_is_told(path: Path) -> None:
    euro = PriceBook.from_toml('name = "e"\ncurrency = "EUR"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1 }')
    with pytest.raises(CorrectionError, match="EUR"):
        correct(history(path, 1), euro, reason="", at_ns=LATER_NS)
    with pytest.raises(CorrectionError, match="no_price"):
        correct(history(path, 12), PriceBook.default(), reason="", at_ns=LATER_NS)


def test_two_corrections_of_one_revision_do_not_both_stand(path: Path) -> None:
    first = correct(history(path, 3), DEARER, reason="one", at_ns=LATER_NS)
    second = correct(history(path, 3), DEARER, reason="two", at_ns=LATER_NS)
    assert first is not None
    assert second is not None
    post(path, [first])
    with pytest.raises(PeriodError, match="req-3"):
        post(path, [second])


def test_verification_sees_a_false_correction(path: Path) -> None:
    row = correct(history(path, 3), DEARER, reason="r", at_ns=LATER_NS)
    assert row is not None
    post(path, [replace(row, amount_nano=(row.amount_nano or 0) + 1)])
    assert "req-3: revision 1 is not" in verify_ledger(path).faults[0]


class TestPeriods:
    def test_a_closed_period_keeps_its_sums_whatever_comes_later(self, path: Path) -> None:
        until = START_NS + 6 * 10**9
        closing = close_period(path, until, LATER_NS)
        assert [total.requests for total in closing.totals] == [6]
        late = altered(billed(2, PriceBook.default()), request_id="late")
        with Ledger(path) as ledger:
            ledger.append(late)
        row = correct(history(path, 3), DEARER, reason="r", at_ns=START_NS)
        assert row is not None
        post(path, [row])
        with LedgerReader(path) as reader:
            assert tuple(reader.totals(RowFilter(until_ns=until))) == closing.totals
            assert closings(reader) == [closing]
            (stored,) = reader.rows(RowFilter(request_id="late"))
        assert stored == replace(row_of(late), posted_ns=until)
        assert history(path, 3)[1].posted_ns == until
        assert verify_ledger(path).faults == []

    def test_a_late_row_again_is_no_conflict(self, path: Path) -> None:
        with Ledger(path) as ledger:
            close_period(path, START_NS + 6 * 10**9, LATER_NS)
            ledger.append(many(3)[2])
            assert ledger.flush()
            assert (ledger.status().duplicates, ledger.status().conflicts) == (1, 0)

    def test_the_table_itself_refuses_a_row_of_a_closed_period(self, path: Path) -> None:
        close_period(path, START_NS + 6 * 10**9, LATER_NS)
        connection = sqlite3.connect(path)
        with pytest.raises(sqlite3.IntegrityError, match="the period is closed"):
            connection.execute(
                "INSERT INTO requests SELECT NULL, 'x', "
                + ", ".join(name for name in LedgerRow.__annotations__ if name != "request_id")
                + " FROM requests LIMIT 1"
            )
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute("DELETE FROM closings")
        connection.close()

    def test_only_what_is_over_and_open_can_be_closed(self, path: Path) -> None:
        with pytest.raises(PeriodError, match="not over"):
            close_period(path, LATER_NS, START_NS)
        close_period(path, START_NS, LATER_NS)
        with pytest.raises(PeriodError, match="already"):
            close_period(path, START_NS, LATER_NS)
        with pytest.raises(LedgerError):
            close_period(path.with_name("none") / "none", START_NS, LATER_NS)

    def test_verification_sees_a_closed_period_that_changed(self, path: Path) -> None:
        close_period(path, START_NS + 6 * 10**9, LATER_NS)
        connection = sqlite3.connect(path)
        connection.execute("DROP TRIGGER closings_no_UPDATE")
        connection.execute("UPDATE closings SET totals = replace(totals, '\"requests\":6', '\"requests\":7')")
        connection.commit()
        connection.close()
        assert "was closed at" in verify_ledger(path).faults[0]
