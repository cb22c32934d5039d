"""Reports: groups and totals are exact sums, and every rendering says the same numbers."""

from __future__ import annotations

import csv
import io
import json

import pytest

from billing.errors import ReportError
from billing.prices import PriceBook
from billing.report_html import render_html
from billing.reports import DIMENSIONS, build_report, format_money, render_csv, render_json, render_table
from billing.row import UNKNOWN_MODEL, LedgerRow, row_of
from billing.tables import counted, spreadsheet_text
from tests.samples.billed import altered, billed, many, unpriced
from tracing.record import Usage, UsageSource


@pytest.fixture(scope="module")
def rows() -> list[LedgerRow]:
    book = PriceBook.default()
    euro = PriceBook.from_toml(
        'name = "e"\ncurrency = "EUR"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
    )
    records = [*many(60), unpriced(60, book), *(billed(number, euro) for number in range(61, 70))]
    return [row_of(record) for record in records]


@pytest.mark.parametrize("by", [(), ("model",), ("team", "agent"), ("day", "run"), ("label:step_name",), ("unpriced",)])
def test_rows_groups_totals_json_and_csv_say_the_same(rows: list[LedgerRow], by: tuple[str, ...]) -> None:
    report = build_report(rows, by)
    for currency in ("USD", "EUR"):
        mine = [row for row in rows if row.currency == currency]
        amount, saved = sum(row.amount_nano or 0 for row in mine), sum(row.saved_nano or 0 for row in mine)
        (total,) = [group.sums for group in report.totals if group.currency == currency]
        assert (total.amount_nano, total.saved_nano, total.requests) == (amount, saved, len(mine))
        assert total.prompt_tokens == sum(row.prompt_tokens for row in mine)
        assert total.hit_tokens == sum(row.hit_tokens for row in mine)
        groups = [group.sums for group in report.groups if group.currency == currency]
        assert sum(sums.amount_nano for sums in groups) == amount

        content = json.loads(render_json(report))
        (in_json,) = [entry for entry in content["totals"] if entry["currency"] == currency]
        assert (in_json["amount_nano"], in_json["amount"]) == (amount, format_money(amount))
        assert sum(entry["saved_nano"] for entry in content["groups"] if entry["currency"] == currency) == saved

        lines = [line for line in csv.DictReader(io.StringIO(render_csv(report))) if line["currency"] == currency]
        assert sum(int(line["amount_nano"]) for line in lines) == amount
        assert sum(int(line["prompt_tokens"]) for line in lines) == total.prompt_tokens
        assert format_money(amount) in render_table(report)


def test_every_dimension_puts_every_row_in_one_group(rows: list[LedgerRow]) -> None:
    for name in DIMENSIONS:
        report = build_report(rows, (name,))
        assert sum(group.sums.requests for group in report.groups) == len(rows), name
        assert len({(group.key, group.currency) for group in report.groups}) == len(report.groups), name


def test_unpriced_requests_are_counted_and_never_priced_at_zero(rows: list[LedgerRow]) -> None:
    report = build_report(rows, ("unpriced",))
    (group,) = [group for group in report.groups if group.key == ("no_price",)]
    assert (group.sums.unpriced, group.sums.requests, group.sums.amount_nano) == (1, 1, 0)
    assert sum(group.sums.unpriced for group in report.totals) == 1


def test_requests_whose_engine_told_nothing_about_hits_are_counted() -> None:
    book = PriceBook.default()
    silent = Usage(fresh_tokens=10, output_tokens=1, source=UsageSource.ENGINE)
    rejected = Usage()
    rows = [row_of(billed(n, book, usage=usage)) for n, usage in enumerate((silent, rejected))]
    assert build_report(rows).totals[0].sums.hits_not_told == 1


def test_costliest_first_or_by_time(rows: list[LedgerRow]) -> None:
    amounts = [g.sums.amount_nano for g in build_report(rows, ("run",)).groups if g.currency == "USD"]
    assert amounts == sorted(amounts, reverse=True)
    hours = [g.key for g in build_report(rows, ("hour",)).groups if g.currency == "USD"]
    assert hours == sorted(hours)


def test_an_unknown_dimension_names_the_known_ones() -> None:
    with pytest.raises(ReportError, match="cannot group by 'colour'; there are model,"):
        build_report([], ("colour",))


@pytest.mark.parametrize(
    ("nano", "text"),
    [(0, "0.000000000"), (-1, "-0.000000001"), (1_000_000_001, "1.000000001"), (-(10**10), "-10.000000000")],
)
def test_money_has_all_nine_decimals(nano: int, text: str) -> None:
    assert format_money(nano) == text


def test_names_that_clients_chose_run_nothing() -> None:
    record = altered(billed(1, PriceBook.default()), model="=cmd()|'x'", labels={"agent": "\x1b[31mred"})
    report = build_report([row_of(record)], ("model", "agent"))
    assert "'=cmd()" in render_csv(report)
    assert "\x1b" not in render_table(report) + render_csv(report)


@pytest.mark.parametrize("name", ["=1", "+1", "-1", "@x", "\t=1", "\r\n=1", " =1", "\x00=1", "＝1"])
def test_no_name_is_a_formula(name: str) -> None:
    text = spreadsheet_text(name)
    assert text.startswith("'")
    assert text.isprintable()


def test_models_that_nobody_serves_are_one_row() -> None:
    """A client may think of a new name for each request; the trace has them."""
    record = billed(1, PriceBook.default())
    refused = [altered(record, model=name, served_model="") for name in ("a\x1b", "b", "c")]
    nameless = altered(record, model="", served_model="")
    report = build_report([row_of(each) for each in (record, *refused, nameless)], ("model",))
    assert {group.key[0]: group.sums.requests for group in report.groups} == {record.model: 1, UNKNOWN_MODEL: 3, "": 1}


def test_an_empty_ledger_gives_an_empty_report() -> None:
    report = build_report([], ("model",))
    assert render_table(report).startswith("model")
    assert json.loads(render_json(report)) == {"by": ["model"], "groups": [], "totals": []}


def test_the_page_has_every_number_and_runs_nothing(rows: list[LedgerRow]) -> None:
    report = build_report(rows, ("team", "agent"))
    page = render_html(report, "spring <b>")
    for group in (*report.groups, *report.totals):
        assert format_money(group.sums.amount_nano) in page
        assert format_money(group.sums.saved_nano) in page
    assert page.count("<rect") == 2 * len(report.groups)
    assert "spring &lt;b&gt;" in page
    hostile = altered(billed(1, PriceBook.default()), labels={"agent": "<script>alert(1)</script>"})
    assert "<script" not in render_html(build_report([row_of(hostile)], ("agent",)), "t")
    assert "<svg" not in render_html(build_report([], ("team",)), "t")


def test_one_is_no_plural() -> None:
    assert [counted(number, "run") for number in (0, 1, 2, 1000)] == ["0 runs", "1 run", "2 runs", "1,000 runs"]
