"""Cache storage by the hour: rows of their own, each hour once, in every report, in FOCUS, and computed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import StorageError
from billing.focus import export
from billing.focus_check import focus_faults
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.periods import close_period, post
from billing.posting import is_request
from billing.prices import PriceBook
from billing.reports import build_report
from billing.row import LedgerRow
from billing.statement import statement
from billing.storage import Lease, storage_faults, storage_rows
from billing.storage_leases import read_leases
from billing.verify import verify_ledger
from gateway.cli import main
from tests.samples.billed import billed

BOOK = """
name = "explicit"
currency = "USD"
[[allowance]]
name = "start"
tokens = 1_000_000
[[price]]
models = ["gemini-*"]
teams = ["research"]
storage_per_hour = 3.6
rates = { fresh = 2, hit = 0.2, output = 12 }
[[price]]
models = ["gemini-*"]
storage_per_hour = 4.5
effective_to = 2026-11-03T00:00:00Z
rates = { fresh = 2, hit = 0.2, output = 12 }
[[price]]
models = ["gemini-*"]
storage_per_hour = 9
rates = { fresh = 2, hit = 0.2, output = 12 }
[[price]]
models = ["*"]
rates = { fresh = 1, hit = 0.1, output = 2 }
"""
HOUR_NS = 3600 * 10**9


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 10**9


@pytest.fixture(scope="module")
def book() -> PriceBook:
    return PriceBook.from_toml(BOOK)


@pytest.fixture(scope="module")
def book_for(book: PriceBook) -> Callable[[str], PriceBook]:
    return lambda model: book


LEASE = Lease("c1", "gemini-3.1-pro", 100_000, at("2026-11-02T22:30"), at("2026-11-03T00:15"), "default", "search", "k")
LATER = at("2026-11-10T00:00")


def test_a_lease_is_charged_hour_by_hour_at_the_price_of_each(book_for: Callable[[str], PriceBook]) -> None:
    rows = storage_rows([LEASE], book_for, (), LATER)
    assert [row.request_id for row in rows] == [f"storage:c1:2026-11-0{hour}" for hour in ("2T22", "2T23", "3T00")]
    assert [row.amount_nano for row in rows] == [225_000_000, 450_000_000, 225_000_000]  # 4.5, 4.5 and then 9 an hour
    assert [row.saved_nano for row in rows] == [-225_000_000, -450_000_000, -225_000_000]
    assert [row.posted_ns for row in rows] == [at("2026-11-02T22:30"), at("2026-11-02T23:00"), at("2026-11-03T00:00")]
    assert not any(map(is_request, rows))


def test_a_contract_has_its_own_price(book_for: Callable[[str], PriceBook]) -> None:
    rows = storage_rows([replace(LEASE, team="research")], book_for, (), LATER)
    assert sum(row.amount_nano or 0 for row in rows) == 100_000 * 105 * 60 * 10**9 // 10**9


def test_only_hours_that_are_over_are_charged_and_each_once(book_for: Callable[[str], PriceBook]) -> None:
    early = storage_rows([LEASE], book_for, (), at("2026-11-02T23:59"))
    assert [row.request_id[-2:] for row in early] == ["22"]
    rest = storage_rows([LEASE], book_for, early, LATER)
    assert [row.request_id[-2:] for row in rest] == ["23", "00"]
    assert storage_rows([LEASE], book_for, [*early, *rest], LATER) == []


def test_what_ended_otherwise_than_was_said_is_a_difference(
    book: PriceBook, book_for: Callable[[str], PriceBook]
) -> None:
    said = storage_rows([LEASE], book_for, (), LATER)
    shorter = replace(LEASE, until_ns=at("2026-11-02T23:20"))
    back = storage_rows([shorter], book_for, said, LATER)
    assert [(row.request_id[-2:], row.revision, row.amount_nano) for row in back] == [
        ("00", 2, -225_000_000), ("23", 2, -300_000_000),
    ]  # fmt: skip
    assert {row.posted_ns for row in back} == {LATER}
    assert not list(storage_faults([*said, *back], {book.version: book}, is_whole=True))
    assert storage_rows([shorter], book_for, [*said, *back], LATER) == []
    longer = storage_rows([LEASE], book_for, [*said, *back], LATER)
    assert sum(row.amount_nano or 0 for row in (*said, *back, *longer)) == sum(row.amount_nano or 0 for row in said)


def test_a_wrong_price_is_mended_by_taking_back_and_charging_again(book: PriceBook) -> None:
    wrong = PriceBook.from_toml(BOOK.replace("4.5", "45"))
    books = {each.version: each for each in (book, wrong)}
    posted = storage_rows([LEASE], lambda model: wrong, (), LATER)
    assert storage_rows([LEASE], lambda model: book, posted, LATER) == []  # what is posted keeps its price
    posted += storage_rows([replace(LEASE, until_ns=LEASE.since_ns)], lambda model: book, posted, LATER)
    assert sum(row.amount_nano or 0 for row in posted) == 0
    posted += storage_rows([LEASE], lambda model: book, posted, LATER)
    assert sum(row.amount_nano or 0 for row in posted) == 900_000_000
    assert not list(storage_faults(posted, books, is_whole=True))


def test_an_hour_stays_with_whom_it_was_charged_to_at_their_price_until_it_is_taken_back(
    book: PriceBook, book_for: Callable[[str], PriceBook]
) -> None:
    theirs = replace(LEASE, team="research", until_ns=at("2026-11-02T22:45"))
    posted = storage_rows([theirs], book_for, (), LATER)
    for told, team, paid in (
        (replace(LEASE, until_ns=at("2026-11-02T23:00")), "research", 180_000_000),  # of others, and longer: at 3.6
        (replace(theirs, model="gemini-flash"), "research", 90_000_000),
        (replace(theirs, until_ns=theirs.since_ns), "research", 0),
        (replace(LEASE, until_ns=at("2026-11-02T23:00")), "search", 225_000_000),  # at 4.5
    ):
        posted += storage_rows([told], book_for, posted, LATER)
        assert (posted[-1].team, posted[-1].model) == (team, LEASE.model)
        assert sum(row.amount_nano or 0 for row in posted) == paid
        assert not list(storage_faults(posted, {book.version: book}, is_whole=True))


def test_what_cannot_be_charged_is_an_error_for_all(book_for: Callable[[str], PriceBook]) -> None:
    with pytest.raises(StorageError, match=r"c2: storage of plain has no price in explicit: no_rate:storage"):
        storage_rows([LEASE, replace(LEASE, id="c2", model="plain")], book_for, (), LATER)
    with pytest.raises(StorageError, match="twice"):
        storage_rows([LEASE, replace(LEASE, tokens=1)], book_for, (), LATER)


def test_what_retention_may_have_removed_stays_as_it_is(book_for: Callable[[str], PriceBook]) -> None:
    rows = storage_rows([LEASE], book_for, (), LATER, kept_ns=at("2026-11-03T00:00"))
    assert [row.request_id[-2:] for row in rows] == ["00"]


def test_every_change_of_a_row_is_found(book: PriceBook, book_for: Callable[[str], PriceBook]) -> None:
    rows, books = storage_rows([LEASE], book_for, (), LATER), {book.version: book}
    assert not list(storage_faults(rows, books, is_whole=True))
    for wrong in (
        replace(rows[1], amount_nano=1),
        replace(rows[1], saved_nano=0),
        replace(rows[1], lines='[["storage",1,450000000]]'),
        replace(rows[1], revision=2),
        replace(rows[1], price_version="?"),
    ):
        found = list(storage_faults([rows[0], _summed(wrong), rows[2]], books, is_whole=True))
        assert len(found) == 1
        assert rows[1].request_id in found[0]


def _summed(row: LedgerRow) -> LedgerRow:
    """Keep a row's line and its amount together, so that only one thing is wrong."""
    lines = json.loads(row.lines)
    return replace(row, lines=json.dumps([[lines[0][0], lines[0][1], row.amount_nano]]))


@given(
    tokens=st.integers(0, 10**7),
    since_s=st.integers(at("2026-11-01T00:00") // 10**9, at("2026-11-05T00:00") // 10**9),
    lives=st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
)
def test_however_often_it_is_told_it_comes_to_what_was_kept_last(tokens: int, since_s: int, lives: list[int]) -> None:
    book = PriceBook.from_toml(BOOK)
    posted: list[LedgerRow] = []
    for life in lives:
        lease = replace(LEASE, tokens=tokens, since_ns=since_s * 10**9, until_ns=(since_s + life) * 10**9)
        posted += storage_rows([lease], lambda model: book, posted, LATER)
    assert not list(storage_faults(posted, {book.version: book}, is_whole=True))
    fresh = storage_rows([lease], lambda model: book, (), LATER)
    assert sum(row.amount_nano or 0 for row in posted) == sum(row.amount_nano or 0 for row in fresh)
    change = at("2026-11-03T00:00") // 10**9
    cheap = max(min(since_s + life, change) - since_s, 0)
    exact = Decimal(tokens * (cheap * 4500 + (life - cheap) * 9000)) / 3600
    assert abs(sum(row.amount_nano or 0 for row in fresh) - exact) <= len(fresh)


def test_a_ledger_has_it_in_every_report_and_verifies(tmp_path: Path, book: PriceBook) -> None:
    path = tmp_path / "ledger.sqlite3"
    with Ledger(path) as ledger:
        ledger.register(book)
        ledger.append(billed(1, book, model="gemini-3.1-pro"))
    post(path, storage_rows([LEASE], lambda model: book, (), LATER))
    assert verify_ledger(path).passed
    with LedgerReader(path) as reader:
        rows, books = list(reader.rows()), reader.price_books()
        assert reader.corrected() == []
        assert list(reader.corrections()) == []
        found = reader.report(("endpoint", "team"))
        assert found == build_report(rows, ("endpoint", "team"))
        dataset = export(rows, books, "USD")
        told = statement(rows, dataset, "team")
    sums = {group.key: group.sums for group in found.groups}
    assert (sums["storage", "search"].requests, sums["storage", "search"].amount_nano) == (0, 900_000_000)
    assert (told["search"].charges_nano, told["search"].corrections_nano) == (900_000_000, 0)
    assert told["search"].list_nano == 900_000_000
    lines = list(dataset.lines())
    assert focus_faults(lines, dataset.billed_nano, "USD") == []
    stored = [line for line in lines if line["x_TokenClass"] == "storage"]
    assert [(line["PricingQuantity"], line["PricingUnit"], line["BilledCost"]) for line in stored] == [
        ("50000.0", "Token-Hours", "0.225000000"),
        ("100000.0", "Token-Hours", "0.450000000"),
        ("25000.0", "Token-Hours", "0.225000000"),
    ]
    assert {line["ChargeCategory"] for line in stored} == {"Usage"}
    assert stored[0]["ListUnitPrice"] == "0.000004500000000000"


def test_hours_of_a_closed_month_are_posted_to_the_open_one(tmp_path: Path, book: PriceBook) -> None:
    path = tmp_path / "ledger.sqlite3"
    with Ledger(path) as ledger:
        ledger.register(book)
    lease = replace(LEASE, since_ns=at("2026-10-31T23:00"), until_ns=at("2026-11-01T01:00"))
    close_period(path, at("2026-11-01T00:00"), LATER)
    post(path, storage_rows([lease], lambda model: book, (), LATER))
    with LedgerReader(path) as reader:
        assert [(row.arrived_ns, row.posted_ns) for row in reader.rows()] == [
            (at("2026-10-31T23:00"), at("2026-11-01T00:00")),
            (at("2026-11-01T00:00"), at("2026-11-01T00:00")),
        ]
    assert verify_ledger(path).passed


class TestLeases:
    CSV = "id,model,tokens,since,until,team\nc1,gemini-3.1-pro,100000,2026-11-02T22:30Z,2026-11-03T01:15+01:00,search\n"

    def test_a_table(self) -> None:
        assert read_leases(self.CSV, key_id="k") == [LEASE]

    def test_what_geminis_api_lists(self) -> None:
        listed = {
            "cachedContents": [
                {
                    "name": "cachedContents/c1",
                    "model": "models/gemini-3.1-pro",
                    "displayName": "handbook",
                    "createTime": "2026-11-02T22:30:00.000000Z",
                    "expireTime": "2026-11-03T00:15:00Z",
                    "usageMetadata": {"totalTokenCount": 100_000},
                }
            ]
        }
        assert read_leases(json.dumps(listed), team="search", key_id="k") == [LEASE]

    def test_a_list_of_none(self) -> None:
        assert read_leases("{}") == []  # so Gemini's API says it

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("id,model\nc,m\n", "no column tokens, since, until"),
            (CSV.replace("100000", "many"), "cached prompt 1 .*many"),
            (CSV.replace("100000", "-1"), "cached prompt 1"),
            (CSV.replace("2026-11-02", "2026-12-02"), "cached prompt 1"),
            (CSV.replace("100000", "9" * 19), "cached prompt 1 .*9999 tokens"),
            (CSV.replace("2026-11-02T22:30Z", "1926-11-02"), "cached prompt 1 .*1926"),
            (CSV.replace("2026-11-02T22:30Z", "0001-01-01T00:00+14:00"), "cached prompt 1 .*out of range"),
            (CSV.replace("c1", "c\0"), r"cached prompt 1 .*its id is 'c\\x00'"),
            ("id,model,tokens,since,until\nc,m,5\n", "cached prompt 1 has no since"),
            (CSV.replace("c1", "c" * 200_000), "line 2 of the table"),
            (r'[{"name": "\ud800", "model": "m", "createTime": "2026-11-02", "expireTime": "2026-11-02",'
             ' "usageMetadata": {"totalTokenCount": 5}}]', "cached prompt 1 .*its id"),
            ("[" * 100_000, "no list of cached contents"),
            ('{"cached": []}', "no list of cached contents"),
            ('{"cachedContents": [], "nextPageToken": "more"}', "nextPageToken"),
            ('[{"name": "c"}]', "no list of cached contents"),
            ("{", "no list of cached contents"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_read(self, text: str, why: str) -> None:
        with pytest.raises(StorageError, match=why):
            read_leases(text)


def test_the_command_posts_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prices, table = tmp_path / "ledger.sqlite3", tmp_path / "book.toml", tmp_path / "leases.csv"
    with Ledger(path):
        pass
    prices.write_text(BOOK)
    table.write_text(TestLeases.CSV)
    command = ["ledger", "--ledger", str(path), "storage", str(table), "--prices", str(prices)]
    for words, said in (
        ([*command, "--dry-run"], "3 rows of storage, together 0.900000000 USD"),
        (command, "3 rows of storage, together 0.900000000 USD"),
        (command, "nothing to post"),
        (["ledger", "verify", "--ledger", str(path)], "verified 3 rows: 0 faults"),
        (["report", "--by", "endpoint", "--ledger", str(path)], "storage"),
    ):
        assert main(words) == 0
        assert said in capsys.readouterr().out
    assert main([*command[:4], str(tmp_path / "none.csv")]) == 1
    assert "No such file" in capsys.readouterr().err
    table.write_text(TestLeases.CSV, "utf-8-sig")
    assert main(command) == 0
    table.write_text(TestLeases.CSV, "utf-16")
    assert main(command) == 1
    assert "leases.csv is no text in UTF-8" in capsys.readouterr().err
