"""Statements, goodput and unit cost: exact sums over the same rows."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from billing.errors import ReportError
from billing.focus import export
from billing.goodput import Objective, goodput
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from billing.reports import build_report, format_money
from billing.row import LedgerRow, row_of
from billing.statement import STATEMENT_UNITS, statement, total_of
from billing.unit_cost import render_unit_costs, unit_costs
from gateway.cli import main
from tests.samples.billed import billed, many
from tests.samples.focus_ledger import fill
from tests.samples.prefixed import STRIDE, prefixed
from tracing.record import Outcome, Stamps

BOOK = PriceBook.default()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statement") / "ledger.sqlite3"
    fill(path)
    return path


@pytest.mark.parametrize("by", STATEMENT_UNITS)
def test_what_is_due_comes_to_the_ledgers_total(path: Path, by: str) -> None:
    with LedgerReader(path) as reader:
        rows, books = list(reader.rows()), reader.price_books()
        (total,) = reader.totals()
        report = {
            group.key[0]: group.sums for group in reader.report((by if by != "model" else "served_model",)).groups
        }
    found = statement(rows, export(rows, books, "USD"), by)
    assert total_of(found).due_nano == total.amount_nano
    assert {unit: (line.due_nano, line.saved_nano) for unit, line in found.items()} == {
        unit: (sums.amount_nano, sums.saved_nano) for unit, sums in report.items()
    }
    whole = total_of(found)
    assert whole.allowances_nano < 0 < whole.corrections_nano
    assert whole.list_nano >= whole.charges_nano + whole.corrections_nano


def test_a_contract_shows_what_it_would_cost_others(path: Path) -> None:
    with LedgerReader(path) as reader:
        rows = list(reader.rows())
        found = statement(rows, export(rows, reader.price_books(), "USD"), "team")
    assert found["team-1"].list_nano > found["team-1"].charges_nano + found["team-1"].corrections_nano
    with pytest.raises(ReportError, match="not for 'colour'"):
        statement([], export([], {}, "USD"), "colour")


def test_the_command_says_the_same_in_every_form(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", "--ledger", str(path), "--statement", "--by", "team"]
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert main([*words, "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {line["team"]: line["due"] for line in lines} == {unit["team"]: unit["due"] for unit in content["units"]}
    assert main(words) == 0
    assert content["total"]["due"] in capsys.readouterr().out


def test_transfers_move_money_between_units_and_none_in_all() -> None:
    rows = [row_of(record) for record in many(3)]
    found = statement(rows, export(rows, {BOOK.version: BOOK}, "USD"), "team", {"team-0": 7, "team-1": -7})
    assert total_of(found).due_nano == sum(row.amount_nano or 0 for row in rows)
    assert found["team-0"].due_nano == (rows[0].amount_nano or 0) + 7


def row(number: int, ttft_ms: int, gaps_ms: int, outcome: Outcome = Outcome.OK) -> LedgerRow:
    record = prefixed(number, "a", BOOK, output=11, outcome=outcome, hits=STRIDE)
    at = record.stamps.arrived_ns
    first = at + ttft_ms * 10**6
    return row_of(replace(record, stamps=Stamps(at, first_token_ns=first, closed_ns=first + gaps_ms * 10**6)))


def test_goodput_counts_what_met_its_keys_objectives() -> None:
    strict = Objective(ttft_ns=100 * 10**6, tpot_ns=10 * 10**6)
    rows = [
        row(0, 100, 100),  # at both limits
        row(1, 101, 100),
        row(2, 100, 101),
        row(3, 1, 1, Outcome.ABORTED),
        row(4, 1, 1, Outcome.REJECTED),
    ]
    found = goodput(rows, ("team",), {"key-a": strict}, Objective(), span_ns=2 * 10**9)
    (sums,) = found.groups.values()
    assert (sums.requests, sums.good) == (4, 1)
    assert found.rate(sums) == 0.5
    lax = goodput(rows, (), {}, Objective())
    assert next(iter(lax.groups.values())).good == 3
    assert lax.span_ns == rows[3].closed_ns - rows[0].arrived_ns


def test_goodput_on_the_command_line(path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["report", "--ledger", str(path), "--goodput", "--by", "outcome", "--home", str(tmp_path)]
    assert main([*words, "--ttft", "1"]) == 0
    assert "100.0%" in capsys.readouterr().out


def test_a_runs_cost_is_a_distribution_over_runs() -> None:
    rows = [row_of(billed(number, BOOK)) for number in range(40)]
    costs = unit_costs(build_report(rows, ("agent", "run")))
    assert {each.agent for each in costs} == {f"agent-{n}" for n in range(4)}
    for each in costs:
        by_run: dict[str, int] = {}
        for other in rows:
            if other.agent == each.agent and other.run_id is not None:
                by_run[other.run_id] = by_run.get(other.run_id, 0) + (other.amount_nano or 0)
        assert (each.runs, each.cost_nano, each.most_nano) == (4, sum(by_run.values()), max(by_run.values()))
        assert each.p50_nano == sorted(by_run.values())[1]
        assert each.p90_nano == max(by_run.values())
        assert format_money(each.most_nano) in render_unit_costs(costs)


def test_runs_on_the_command_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--ledger", str(path), "--runs"]) == 0
    assert "steps a run" in capsys.readouterr().out
