"""``keepwarm report`` and ``keepwarm prices``, as the command line runs them."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sqlite3
from pathlib import Path
from types import ModuleType

import pytest

from billing.errors import ReportError
from billing.ledger import Ledger
from billing.prices import PriceBook
from gateway.commands import credits as credits_command
from gateway.commands import ledger as ledger_command
from gateway.commands import prices, report
from gateway.commands.report import parse_moment
from tests.samples.billed import many


def run(command: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(arguments)))


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    path = tmp_path / "ledger.sqlite3"
    with Ledger(path) as opened:
        opened.register(PriceBook.default())
        for record in many(30):
            opened.append(record)
    return str(path)


class TestReport:
    def test_json_and_csv_and_table_agree(self, ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(report, "--ledger", ledger, "--by", "team,model", "--json") == 0
        content = json.loads(capsys.readouterr().out)
        assert run(report, "--ledger", ledger, "--by", "team,model", "--csv") == 0
        lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert [line["team"] for line in lines] == [entry["team"] for entry in content["groups"]]
        assert sum(int(line["amount_nano"]) for line in lines) == content["totals"][0]["amount_nano"]
        assert run(report, "--ledger", ledger) == 0
        assert content["totals"][0]["amount"] in capsys.readouterr().out

    def test_a_period_and_a_run(self, ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(report, "--ledger", ledger, "--run", "run-2", "--json") == 0
        assert json.loads(capsys.readouterr().out)["totals"][0]["requests"] == 10
        assert run(report, "--ledger", ledger, "--until", "2000-01-01", "--json") == 0
        assert json.loads(capsys.readouterr().out)["totals"] == []

    def test_verify_tells_a_changed_amount(self, ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(report, "--ledger", ledger, "--verify") == 0
        assert "verified 30 rows: 0 faults" in capsys.readouterr().err
        connection = sqlite3.connect(ledger)
        connection.execute("DROP TRIGGER requests_no_UPDATE")
        connection.execute("UPDATE requests SET amount_nano = amount_nano + 1 WHERE request_id = 'req-3'")
        connection.commit()
        connection.close()
        assert run(report, "--ledger", ledger, "--verify") == 1
        assert "req-3" in capsys.readouterr().err

    @pytest.mark.parametrize("wrong", [("--by", "colour"), ("--since", "yesterday")])
    def test_a_wrong_word_is_told(
        self, ledger: str, wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(report, "--ledger", ledger, *wrong) == 1
        assert wrong[1] in capsys.readouterr().err

    def test_a_ledger_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(report, "--ledger", str(tmp_path / "none")) == 1
        assert "there is no ledger" in capsys.readouterr().err

    def test_moments(self) -> None:
        day = 86_400 * 10**9
        assert parse_moment("1970-01-02", 0) == parse_moment("1970-01-02T02:00+02:00", 0) == day
        assert parse_moment("1970-01-01T00:00:00.000001Z", 0) == 1000
        assert parse_moment("2d", 5 * day) == 3 * day
        with pytest.raises(ReportError):
            parse_moment("2w", 0)


def test_the_first_groups_alone_keep_the_totals_of_all(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for words in ((), ("--limit", "2"), ("--limit", "30")):
        assert run(report, "--ledger", ledger, "--by", "request", "--json", *words) == 0
        out, err = capsys.readouterr()
        found.append((json.loads(out), err))
    (whole, _), (first, said), (all_, silent) = found
    assert first == whole | {"groups": whole["groups"][:2]}
    assert said == "2 of 30 groups\n"
    assert (all_, silent) == (whole, "")


@pytest.mark.parametrize("form", ["--focus", "--goodput", "--statement", "--runs"])
def test_a_limit_that_would_limit_nothing_is_told(ledger: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(report, "--ledger", ledger, "--limit", "1", form) == 1
    assert "--limit is for groups" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["--focus", "--statement"])
def test_a_currency_that_is_none_is_told(ledger: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(report, "--ledger", ledger, form, "--currency", "usd") == 1
    assert "three capital letters" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "soon"])
def test_an_objective_is_a_time(ledger: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(report, "--ledger", ledger, "--goodput", "--ttft", text)
    assert f"--ttft: {text!r} is no" in (told := capsys.readouterr().err) or f"--ttft: {text} is no" in told


@pytest.mark.parametrize("since", ["0001-01-01T00:00+14:00", "999999999999d"])
def test_a_period_beyond_all_that_is_recorded_is_everything(
    ledger: str, since: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(report, "--ledger", ledger, "--since", since, "--until", "9999-12-31", "--json") == 0
    assert json.loads(capsys.readouterr().out)["totals"][0]["requests"] == 30


class TestPrices:
    def test_check(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
        good.write_text('name = "g"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 1 }')
        bad.write_text('name = "b"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { frehs = 1 }')
        assert run(prices, "check", str(good)) == 0
        assert PriceBook.load(good).version in capsys.readouterr().out
        assert run(prices, "check", str(bad), str(good)) == 1
        told = capsys.readouterr()
        assert "price[0].rates.frehs: there is no such key" in told.err
        assert str(good) in told.out

    def test_show(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(prices, "show") == 0
        assert "hit_pool     0.004" in capsys.readouterr().out
        assert run(prices, "show", "--model", "SmolLM2", "--at", "2026-11-01") == 0
        assert "hit_disk     0.003" in capsys.readouterr().out
        assert run(prices, "show", "--model", "unknown") == 1
        assert "unpriced: no_price" in capsys.readouterr().out

    def test_without_a_file_the_books_of_the_settings_are_shown_and_checked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, model, currency in (("main", "m", "USD"), ("second", "n", "CNY")):
            head = f'name = "{name}"\ncurrency = "{currency}"\n'
            (tmp_path / f"{name}.toml").write_text(
                f'{head}price = [{{ models = ["{model}"], rates = {{ fresh = 1 }} }}]'
            )
        settings = tmp_path / "keepwarm.toml"
        settings.write_text(
            '[billing]\nprices = "main.toml"\n[[billing.books]]\nprices = "second.toml"\nmodels = ["n"]\n'
        )
        assert run(prices, "--config", str(settings), "show") == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "version" in line] == [
            "main",
            "second",
        ]
        assert run(prices, "show", "--config", str(settings), "--model", "n") == 0
        assert capsys.readouterr().out.startswith("second ")
        assert run(prices, "check", "--config", str(settings)) == 0
        assert "second.toml: second, 1 price in CNY" in capsys.readouterr().out
        settings.write_text("")
        assert run(prices, "--config", str(settings), "check") == 1
        assert "name no price book" in capsys.readouterr().err

    def test_show_tells_fees_storage_and_what_the_cache_keeps(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "book.toml"
        path.write_text(
            'name = "g"\ncurrency = "USD"\nallowance = [{ name = "start", tokens = 5, per = ["team"] }]\n'
            'price = [{ models = ["m"], request_fee = 0.001, request_minimum = 0.002, storage_per_hour = 4.5,'
            " cache_minimum_tokens = 1024, cache_lifetime_s = 300, rates = { fresh = 1 } }]"
        )
        assert run(prices, "show", str(path), "--model", "m") == 0
        told = capsys.readouterr().out
        for words in ("0.001000000", "0.002000000 a request", "4.5 an hour", "from 1024 tokens on", "300 s after"):
            assert words in told
        assert run(prices, "show", str(path)) == 0
        assert "free: start, 5 tokens a month for each team" in capsys.readouterr().out

    def test_verify_cases(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "cases.json"
        case = {
            "ref": "one",
            "shape": "openai",
            "usage": {"prompt_tokens": 20212, "cached_tokens": 16298, "completion_tokens": 931},
            "rates_per_mtok": {"input": "0.5", "read": "0.05", "output": "3"},
            "right": "0.0055649",
        }
        path.write_text(json.dumps([case]))
        assert run(prices, "verify-cases", str(path)) == 0
        assert "1 of 1 cases agree" in capsys.readouterr().out
        path.write_text(json.dumps([case, case | {"right": "0.0137139"}]))
        assert run(prices, "verify-cases", str(path)) == 1
        assert "0.0055649  WRONG, should be 0.0137139" in capsys.readouterr().out
        path.write_text("[]")
        assert run(prices, "verify-cases", str(path)) == 1
        path.write_text("{")
        assert run(prices, "verify-cases", str(path)) == 1
        assert "cannot be read" in capsys.readouterr().err


class TestLedger:
    def test_a_period_is_closed_and_what_was_wrong_is_posted_after_it(
        self, ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        book = tmp_path / "right.toml"
        book.write_text(
            'name = "right"\ncurrency = "USD"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 1, output = 1 }'
        )
        assert run(ledger_command, "close", "--ledger", ledger, "2026-11-01") == 0
        assert run(ledger_command, "periods", "--ledger", ledger) == 0
        assert "until 2026-11-01T00:00:00Z" in capsys.readouterr().out
        words = ("reprice", "--ledger", ledger, "--prices", str(book), "--reason", "wrong book")
        assert run(ledger_command, *words, "--dry-run") == 0
        assert run(ledger_command, *words) == 0
        assert run(ledger_command, *words) == 0
        assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
            "30 corrections",
            "30 corrections",
            "0 corrections",
        ]
        assert run(ledger_command, "verify", "--ledger", ledger) == 0
        assert "verified 60 rows: 0 faults" in capsys.readouterr().out
        assert run(report, "--ledger", ledger, "--json") == 0
        (total,) = json.loads(capsys.readouterr().out)["totals"]
        assert total["amount_nano"] == 1000 * (total["prompt_tokens"] + total["output_tokens"])
        assert (total["requests"], total["corrections"]) == (30, 30)

    def test_what_cannot_be_done_is_told(self, ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(ledger_command, "close", "--ledger", ledger, "2999-01-01") == 1
        assert "not over" in capsys.readouterr().err

    @pytest.mark.parametrize("count", ["-1", "30000", "99999999999"])
    def test_months_before_all_time_cannot_be_kept(
        self, ledger: str, count: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            run(ledger_command, "remove", "--ledger", ledger, "--keep-months", count)
        assert f"--keep-months: {count} is not within" in capsys.readouterr().err


@pytest.mark.parametrize("month", ["0001-01", "2262-04", "9999-12"])
def test_a_month_that_no_row_can_be_of_is_told(ledger: str, month: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(credits_command, "settle", month, "--ledger", ledger) == 1
    assert f"'{month}' is no month" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "much", "1e99"])
def test_a_gpu_hour_has_a_price(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = ("--prefill-tokens-per-s", "9", "--decode-tokens-per-s", "9")
    with pytest.raises(SystemExit):
        run(prices, "from-gpu-hours", "--model", "m", "--gpu-hour", text, *speeds)
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"--gpu-hour: {text!r} is no number" in told or f"--gpu-hour: {text} is no number" in told
