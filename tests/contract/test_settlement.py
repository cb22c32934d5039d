"""Settling allowances in a file and in a server: the same credits, posted once, verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from billing.corrections import correct
from billing.database import LedgerDatabase, database_at
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader, RowFilter
from billing.periods import close_period, post
from billing.postgres.database import postgres_database
from billing.prices import PriceBook
from billing.settlement import settle, settle_open_months
from billing.verify import verify_ledger
from tests.samples.billed import START_NS, billed
from tests.samples.postgres import Server
from tracing.record import Usage, UsageSource

BOOK = PriceBook.from_toml(
    """
    name = "free"
    currency = "USD"
    allowance = [{ name = "start", tokens = 250, classes = ["fresh"] }]
    [[price]]
    models = ["m"]
    rates = { fresh = 1, hit = 0.1, output = 3 }
    """
)
MONTH, END_NS = "2026-09", 1_790_812_800 * 10**9
NOW_NS = END_NS + 10**15


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerDatabase:
    if request.param == "sqlite":
        return database_at(tmp_path / "ledger.sqlite3")
    server: Server = request.getfixturevalue("postgres")
    return postgres_database(server.database(), tmp_path / "journal")


def test_allowances_are_settled_alike(database: LedgerDatabase) -> None:
    usage = Usage(fresh_tokens=100, output_tokens=10, source=UsageSource.ENGINE)
    with Ledger(database) as ledger:
        ledger.register(BOOK)
        for number in (2, 0, 3, 1):
            ledger.append(replace(billed(number, BOOK, model="m", usage=usage), request_id=f"req-{number}"))
    with LedgerReader(database) as reader:
        order = [row.request_id for row in reader.rows_by_posting()]
        history = reader.history("req-0")
    assert order == [f"req-{number}" for number in range(4)]
    assert sum(row.amount_nano or 0 for row in settle(database, MONTH, NOW_NS)) == -250_000
    fewer = Usage(fresh_tokens=20, output_tokens=10, source=UsageSource.ENGINE)
    correction = correct(history, BOOK, reason="miscounted", at_ns=START_NS + 10**9, usage=fewer)
    assert correction is not None
    post(database, [correction])
    rows = settle_open_months(database, END_NS, NOW_NS)
    # 100, 100 and 50 tokens were free; now 20, 100, 100 and 30 are
    assert sorted((row.run_id, row.amount_nano) for row in rows) == [
        ("run-0", -50_000),
        ("run-0", -30_000),
        ("run-0", 80_000),
    ]
    close_period(database, END_NS, NOW_NS)
    assert verify_ledger(database).faults == []
    with LedgerReader(database) as reader:
        assert [row.revision for row in reader.corrections()] == [1]
        (total,) = reader.totals(RowFilter(until_ns=END_NS))
        assert sum(row.amount_nano or 0 for row in reader.credits()) == -250_000
    assert total.amount_nano == 4 * 30_000 + 320_000 - 250_000
