"""The FOCUS export: exact money, one unit price a line, closed lists, and a checker that sees what is wrong."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from billing.errors import ReportError
from billing.focus import FocusExport, FocusOptions, export
from billing.focus_check import focus_faults
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from billing.row import LedgerRow, row_of
from tests.samples.billed import billed
from tests.samples.focus_ledger import fill


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[LedgerRow], dict[str, PriceBook]]:
    path = tmp_path_factory.mktemp("focus") / "ledger.sqlite3"
    fill(path)
    with LedgerReader(path) as reader:
        return list(reader.rows()), reader.price_books()


@pytest.fixture(scope="module")
def dataset(ledger: tuple[list[LedgerRow], dict[str, PriceBook]]) -> FocusExport:
    return export(*ledger, "USD")


@pytest.fixture(scope="module")
def lines(dataset: FocusExport) -> list[dict[str, str]]:
    file = io.StringIO()
    assert dataset.write(file) == len(dataset.sums)
    return list(csv.DictReader(io.StringIO(file.getvalue())))


def test_the_lines_come_to_the_rows_exactly(
    ledger: tuple[list[LedgerRow], dict[str, PriceBook]], dataset: FocusExport, lines: list[dict[str, str]]
) -> None:
    billed_nano = sum(row.amount_nano or 0 for row in ledger[0])
    assert dataset.billed_nano == billed_nano
    assert sum(Decimal(line["BilledCost"]) for line in lines) == Decimal(billed_nano).scaleb(-9)
    assert focus_faults(lines, billed_nano, "USD") == []
    tokens = sum(Decimal(line["PricingQuantity"]) for line in lines if line["PricingUnit"] == "Tokens")
    priced = [row for row in ledger[0] if row.amount_nano is not None]
    assert tokens == sum(row.prompt_tokens + row.output_tokens for row in priced)
    assert (dataset.requests, dataset.unpriced) == (92, 2)


def test_every_kind_of_line_is_there(lines: list[dict[str, str]]) -> None:
    assert {line["x_TokenClass"] for line in lines} >= {
        "fresh", "hit_device", "write_5m", "reasoning", "request", "allowance", "lost_hits",
    }  # fmt: skip
    assert {line["ChargeClass"] for line in lines} == {"", "Correction"}
    assert {line["ChargeCategory"] for line in lines} == {"Usage", "Adjustment", "Credit"}
    assert any("window peak" in line["SkuPriceId"] for line in lines)
    assert any("above 3000" in line["SkuPriceId"] for line in lines)
    assert any("tier batch" in line["SkuPriceId"] for line in lines)


def test_a_contract_is_listed_at_what_others_pay(lines: list[dict[str, str]]) -> None:
    mine = [line for line in lines if line["SubAccountId"] == "team-1" and line["x_Model"].startswith("big-")]
    usage = [line for line in mine if line["ChargeClass"] == "" and line["x_TokenClass"] == "fresh"]
    assert usage
    for line in usage:
        assert Decimal(line["ListUnitPrice"]) > Decimal(line["ContractedUnitPrice"])
        assert Decimal(line["ListCost"]) > Decimal(line["BilledCost"])
    others = [line for line in lines if line["SubAccountId"] != "team-1" and line["ChargeClass"] == ""]
    assert all(line["ListCost"] == line["BilledCost"] for line in others)


def test_detail_has_runs_and_the_same_money(ledger: tuple[list[LedgerRow], dict[str, PriceBook]]) -> None:
    detailed = export(*ledger, "USD", FocusOptions(detail=True))
    lines = list(detailed.lines())
    assert focus_faults(lines, sum(row.amount_nano or 0 for row in ledger[0]), "USD") == []
    assert {"run-0", "run-1"} <= {line["x_RunId"] for line in lines}


@pytest.mark.parametrize("detail", [False, True])
def test_a_dataset_of_nothing_is_the_header_alone(
    ledger: tuple[list[LedgerRow], dict[str, PriceBook]], detail: bool
) -> None:
    rows, books = ledger
    some, none = io.StringIO(), io.StringIO()
    export(rows, books, "USD", FocusOptions(detail=detail)).write(some)
    assert export([], books, "USD", FocusOptions(detail=detail)).write(none) == 0
    assert none.getvalue() == some.getvalue().splitlines(keepends=True)[0]


def test_names_that_clients_chose_run_nothing(ledger: tuple[list[LedgerRow], dict[str, PriceBook]]) -> None:
    rows, books = ledger
    named = [replace(row, team="=cmd()", run_id="@\x1b[31m") for row in rows if row.amount_nano is not None]
    for line in export(named, books, "USD", FocusOptions(detail=True)).lines():
        assert (line["SubAccountId"], line["x_RunId"]) == ("'=cmd()", "'@\ufffd[31m")
        assert json.loads(line["Tags"])["team"] == "=cmd()"  # no cell that anybody takes for a formula


def test_one_currency_a_dataset() -> None:
    euro = PriceBook.from_toml(
        'name = "e"\ncurrency = "EUR"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
    )
    dollar = PriceBook.default()
    rows = [row_of(billed(1, euro)), row_of(billed(2, dollar))]
    books = {book.version: book for book in (euro, dollar)}
    assert {line["BillingCurrency"] for line in export(rows, books, "EUR").lines()} == {"EUR"}
    assert list(export(rows, books, "GBP").lines()) == []
    with pytest.raises(ReportError, match="is not stored"):
        export(rows, {}, "EUR")


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("BilledCost", "0.000000001", "the lines come to"),
        ("BilledCost", "0.0000000001", "no whole number of nano-units"),
        ("EffectiveCost", "5.000000000", "EffectiveCost and ContractedCost differ"),
        ("ListCost", "999.000000000", "ListCost is not"),
        ("ContractedUnitPrice", "0.5", "BilledCost is not"),
        ("ServiceCategory", "Artificial", "ServiceCategory"),
        ("ChargeCategory", "Tax", "ChargeCategory"),
        ("ChargeCategory", "Credit", "is no Credit"),
        ("BillingCurrency", "EUR", "BillingCurrency"),
        ("ChargePeriodEnd", "2026-12-01T00:00:00Z", "no hour"),
        ("BillingPeriodEnd", "2026-01-01T00:00:00Z", "after its billing period"),
        ("ConsumedQuantity", "1.0", "ConsumedQuantity"),
        ("Tags", "[]", "Tags"),
        ("BilledCost", "much", "line 1"),
    ],
)
def test_the_checker_sees_what_the_validator_does_not(
    dataset: FocusExport, lines: list[dict[str, str]], column: str, value: str, told: str
) -> None:
    first = next(n for n, line in enumerate(lines) if line["x_TokenClass"] == "fresh" and line["ChargeClass"] == "")
    broken = [lines[first] | {column: value}, *lines[:first], *lines[first + 1 :]]
    assert any(told in fault for fault in focus_faults(broken, dataset.billed_nano, "USD"))


def test_the_checker_sees_a_line_twice(dataset: FocusExport, lines: list[dict[str, str]]) -> None:
    assert any("stands above" in fault for fault in focus_faults([*lines, lines[0]], dataset.billed_nano, "USD"))


def test_the_export_from_a_file_is_the_same(tmp_path: Path, lines: list[dict[str, str]]) -> None:
    path = tmp_path / "ledger.sqlite3"
    fill(path)
    with LedgerReader(path) as reader:
        again = list(export(reader.rows(), reader.price_books(), "USD").lines())
    assert again == lines
