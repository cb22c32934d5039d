"""Rollups: a report from sums equals the report from rows, whatever was folded, asked for, and cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.database_sqlite import SqliteDatabase
from billing.group import write_group
from billing.ledger_read import LedgerReader, RowFilter
from billing.prices import PriceBook
from billing.reports import DIMENSIONS, SUM_NAMES, build_report
from billing.rollup import HOUR_NS, SUMS, advance, watermark
from billing.row import row_values
from tests.samples.billed import START_NS, altered, billed, died_in_flight, unpriced
from tracing.record import RequestRecord, Stamps

EURO = PriceBook.from_toml(
    'name = "e"\ncurrency = "EUR"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
)
FIRST_HOUR_NS = START_NS // HOUR_NS * HOUR_NS


def spread(number: int) -> RequestRecord:
    """Requests over five hours, two currencies, with and without a price."""
    make = (billed, billed, unpriced, died_in_flight)[number % 4]
    record = make(number, EURO if number % 5 == 0 else PriceBook.default())
    return altered(record, stamps=Stamps(FIRST_HOUR_NS + number * HOUR_NS // 24, closed_ns=FIRST_HOUR_NS))


@pytest.fixture(scope="module", params=[0, 7, 50, 120], ids=lambda folded: f"{folded} of 120 folded")
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerReader]:
    path = tmp_path_factory.mktemp("rollup") / "ledger.sqlite3"
    session = SqliteDatabase(path).open()
    write_group(session, [row_values(spread(number)) for number in range(120)])
    while request.param and advance(session, 7) and watermark(session) < request.param:
        pass
    session.close()
    with LedgerReader(path) as opened:
        yield opened


def test_the_sums_in_sql_are_those_in_python() -> None:
    assert tuple(SUMS) == SUM_NAMES


@pytest.mark.parametrize("by", [(), *((name,) for name in DIMENSIONS), ("day", "team", "hour"), ("model", "month")])
def test_every_dimension(reader: LedgerReader, by: tuple[str, ...]) -> None:
    assert reader.report(by) == build_report(reader.rows(), by)


@pytest.mark.parametrize("since", [None, 0, HOUR_NS, HOUR_NS + 1, HOUR_NS + HOUR_NS // 2, 2 * HOUR_NS])
@pytest.mark.parametrize("until", [None, HOUR_NS, HOUR_NS + HOUR_NS // 3, 2 * HOUR_NS - 1, 3 * HOUR_NS, 9 * HOUR_NS])
def test_every_cut(reader: LedgerReader, since: int | None, until: int | None) -> None:
    where = RowFilter(
        since_ns=None if since is None else FIRST_HOUR_NS + since,
        until_ns=None if until is None else FIRST_HOUR_NS + until,
    )
    by = ("team", "hour")
    assert reader.report(by, where) == build_report(reader.rows(where), by)


def test_one_run_and_one_request(reader: LedgerReader) -> None:
    for where in (RowFilter(run_id="run-3"), RowFilter(request_id="req-44"), RowFilter(run_id="none")):
        assert reader.report(("step", "team"), where) == build_report(reader.rows(where), ("step", "team"))


def test_labels_are_read_from_rows(reader: LedgerReader) -> None:
    assert reader.report(("label:step_name",)) == build_report(reader.rows(), ("label:step_name",))


def test_folding_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    session = SqliteDatabase(path).open()
    write_group(session, [row_values(spread(number)) for number in range(10)])
    assert [advance(session, 6), advance(session, 6), advance(session, 6)] == [6, 4, 0]
    before = session.query("SELECT * FROM rollups ORDER BY 1, 2")
    assert advance(session) == 0
    assert session.query("SELECT * FROM rollups ORDER BY 1, 2") == before
    session.close()
