"""Free allowances: exact whoever wrote the rows and in whatever order, posted as credits, verified with the rest."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs

from billing.allowances import grants
from billing.corrections import correct
from billing.credits import Grant, is_credit
from billing.errors import PeriodError, PriceBookError
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader, RowFilter
from billing.meter import charge
from billing.periods import close_period, post
from billing.posting import CREDIT
from billing.prices import PriceBook
from billing.row import LedgerRow, row_of
from billing.settlement import settle, settle_open_months
from billing.verify import verify_ledger
from tests.samples.billed import billed
from tracing.record import Identity, RequestRecord, Stamps, Usage, UsageSource

START_NS = int(datetime(2026, 11, 3, tzinfo=UTC).timestamp()) * 10**9
END_NS = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp()) * 10**9
NOW_NS = END_NS + 5 * 86400 * 10**9


def book(allowance: str) -> PriceBook:
    return PriceBook.from_toml(
        f"""
        name = "free"
        currency = "USD"
        [[allowance]]
        {allowance}
        [[price]]
        models = ["m"]
        request_fee = 0.00001
        rates = {{ fresh = 1, hit = 0.1, output = 3 }}
        """
    )


def record(number: int, prices: PriceBook, *, fresh: int = 100, output: int = 10, team: str = "a") -> RequestRecord:
    arrived = START_NS + number * 3600 * 10**9
    usage = Usage(fresh_tokens=fresh, output_tokens=output, source=UsageSource.ENGINE)
    return structs.replace(
        billed(number, prices, model="m"),
        identity=Identity("acme", team, f"key-{team}"),
        usage=usage,
        charge=charge(usage, prices, "m", arrived, team=team),
        stamps=Stamps(arrived, closed_ns=arrived + 10**9),
    )


def sums(rows: list[LedgerRow], prices: PriceBook) -> dict[str, Grant]:
    found: dict[str, Grant] = {}
    for key, grant in grants(rows, {prices.version: prices}).items():
        total = found.setdefault(f"{key.place.team} {key.period}", Grant())
        total.quantity += grant.quantity
        total.amount_nano += grant.amount_nano
    return found


def test_tokens_are_free_until_the_limit_in_the_order_of_the_accounts() -> None:
    prices = book('name = "start"\ntokens = 250\nper = ["team"]')
    rows = [row_of(record(number, prices)) for number in range(5)]
    others = [row_of(record(number, prices, team="b")) for number in range(10, 12)]
    expected = {
        # two requests of 110 tokens, and 30 of the 100 fresh tokens of the third
        "a 2026-11": Grant(250, 2 * (100 * 1000 + 10 * 3000) + 30 * 1000),
        "b 2026-11": Grant(220, 2 * (100 * 1000 + 10 * 3000)),
    }
    for seed in range(3):
        mixed = rows + others
        random.Random(seed).shuffle(mixed)
        assert sums(mixed, prices) == expected


def test_one_allowance_shared_by_all() -> None:
    prices = book('name = "start"\ntokens = 250')
    rows = [row_of(record(number, prices, team="ab"[number % 2])) for number in range(4)]
    assert sums(rows, prices) == {"a 2026-11": Grant(140, 160_000), "b 2026-11": Grant(110, 130_000)}


@pytest.mark.parametrize(
    ("allowance", "quantity", "amount"),
    [
        ("requests = 2", 2, 2 * (130_000 + 10_000)),
        ("money = 0.0002", 0, 200_000),
        ('tokens = 150\nclasses = ["output"]', 50, 5 * 30_000),
        ('tokens = 35\nclasses = ["output"]', 35, 35 * 3000),
        ('tokens = 1_000_000\nmodels = ["other-*"]', None, None),
        ('tokens = 1_000_000\nteams = ["b"]', None, None),
        ('tokens = 60\nperiod = "day"\nclasses = ["fresh"]', 60, 60_000),
    ],
)
def test_measures(allowance: str, quantity: int | None, amount: int | None) -> None:
    prices = book(f'name = "start"\n{allowance}')
    found = list(sums([row_of(record(number, prices)) for number in range(5)], prices).values())
    if amount is None:
        assert found == []
        return
    assert [grant.amount_nano for grant in found] == [amount]
    if quantity:
        assert found[0].quantity == quantity


def test_a_day_begins_anew() -> None:
    prices = book('name = "start"\ntokens = 60\nperiod = "day"\nclasses = ["fresh"]')
    rows = [row_of(record(number, prices)) for number in (0, 1, 30)]
    assert sums(rows, prices) == {"a 2026-11-03": Grant(60, 60_000), "a 2026-11-04": Grant(60, 60_000)}


def test_what_a_correction_takes_back_is_free_for_others() -> None:
    prices = book('name = "start"\ntokens = 150\nclasses = ["fresh"]')
    rows = [row_of(record(number, prices)) for number in range(3)]
    fewer = Usage(fresh_tokens=20, output_tokens=10, source=UsageSource.ENGINE)
    correction = correct([rows[0]], prices, reason="miscounted", at_ns=START_NS + 10, usage=fewer)
    assert correction is not None
    assert sums(rows, prices) == {"a 2026-11": Grant(150, 150_000)}
    # 20 of the first, 100 of the second, 30 of the third
    assert sums([*rows, correction], prices) == {"a 2026-11": Grant(150, 150_000)}
    assert sums([rows[0], correction], prices) == {"a 2026-11": Grant(20, 20_000)}


def test_half_a_line_is_rounded_once() -> None:
    prices = PriceBook.from_toml(
        """
        name = "free"
        currency = "USD"
        allowance = [{ name = "start", tokens = 1 }]
        [[price]]
        models = ["m"]
        rates = { fresh = 0.0015, output = 1 }
        """
    )
    row = row_of(record(0, prices, fresh=3, output=0))  # 3 tokens for 4.5, rounded to 4 nano-units
    assert sums([row], prices) == {"a 2026-11": Grant(1, 1)}


def fill(path: Path, prices: PriceBook, writers: int = 4, each: int = 25) -> None:
    """Write requests from several writers at once."""
    with Ledger(path) as ledger:
        ledger.register(prices)

    def write(first: int) -> None:
        with Ledger(path) as own:
            for number in range(first, first + each):
                own.append(record(number, prices, team="ab"[number % 2]))

    threads = [threading.Thread(target=write, args=(number * each,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_settling_is_exact_under_concurrent_writers_and_settlers(tmp_path: Path) -> None:
    path, prices = tmp_path / "ledger.sqlite3", book('name = "start"\ntokens = 2_000\nclasses = ["fresh"]')
    fill(path, prices)
    failures: list[PeriodError] = []

    def settle_now() -> None:
        try:
            settle(path, "2026-11", NOW_NS)
        except PeriodError as error:
            failures.append(error)

    threads = [threading.Thread(target=settle_now) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(path, "2026-11", NOW_NS)
    assert settle(path, "2026-11", NOW_NS) == []
    with LedgerReader(path) as reader:
        credits = list(reader.credits())
        totals = reader.totals()
        by_team = {group.key: group.sums.amount_nano for group in reader.report(("team", "endpoint")).groups}
        assert reader.corrected() == []
    assert sum(row.amount_nano or 0 for row in credits) == -2_000 * 1000
    assert (totals[0].requests, totals[0].amount_nano) == (100, 100 * 140_000 - 2_000_000)
    assert by_team["a", CREDIT] == by_team["b", CREDIT] == -1_000_000
    assert verify_ledger(path).faults == []


def test_later_rows_are_settled_later_and_closed_periods_keep_their_sums(tmp_path: Path) -> None:
    path, prices = tmp_path / "ledger.sqlite3", book('name = "start"\ntokens = 1_000\nclasses = ["fresh"]')
    with Ledger(path) as ledger:
        ledger.register(prices)
        ledger.append(record(0, prices))
    assert [row.amount_nano for row in settle(path, "2026-11", START_NS + 1)] == [-100_000]
    with Ledger(path) as ledger:
        ledger.append(record(10, prices, fresh=950))
    rows = settle_open_months(path, END_NS, NOW_NS)
    assert [row.amount_nano for row in rows] == [-900_000]
    close_period(path, END_NS, NOW_NS)
    with Ledger(path) as ledger:
        ledger.append(record(20, prices))  # comes late: it is December's
    assert [row.amount_nano for row in settle(path, "2026-11", NOW_NS)] == []
    assert [row.amount_nano for row in settle(path, "2026-12", NOW_NS)] == [-100_000]
    assert verify_ledger(path).faults == []


def test_verification_sees_a_credit_that_nothing_grants(tmp_path: Path) -> None:
    path, prices = tmp_path / "ledger.sqlite3", book('name = "start"\ntokens = 1_000')
    with Ledger(path) as ledger:
        ledger.register(prices)
        ledger.append(record(0, prices))
    (row,) = settle(path, "2026-11", NOW_NS)
    post(path, [replace(row, revision=2, amount_nano=-1, lines='[["allowance",0,-1]]')])
    close_period(path, END_NS, NOW_NS)
    assert any(row.request_id in fault for fault in verify_ledger(path).faults)
    with LedgerReader(path) as reader:
        assert all(is_credit(each) for each in reader.rows(RowFilter(request_id=row.request_id)))


@pytest.mark.parametrize(
    ("allowance", "told"),
    [
        ('name = "x"', "exactly one of tokens"),
        ('name = "x"\ntokens = 5\nmoney = 1', "exactly one of tokens"),
        ('name = "x"\nmoney = "0.0000000001"', "more than 9 decimals"),
        ('name = "x"\nrequests = 5\nclasses = ["fresh"]', "free of all its tokens"),
        ('name = "x"\ntokens = 5\nclasses = ["input"]', "classes"),
        ('name = "x"\ntokens = 5\n[[allowance]]\nname = "x"\nrequests = 1', "two have the same name"),
    ],
)
def test_an_allowance_that_says_nothing_clear_is_refused(allowance: str, told: str) -> None:
    with pytest.raises(PriceBookError, match=told):
        book(allowance)
