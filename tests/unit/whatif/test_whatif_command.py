"""``keepwarm whatif`` over a ledger and a trace store, and its numbers beside the ledger's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from billing.ledger import Ledger
from billing.prices import PriceBook
from gateway.cli import main
from tests.samples.prefixed import STRIDE, prefixed
from tracing.store import TraceStore, TraceStoreOptions

BOOK = PriceBook.from_toml(
    """
    name = "b"
    currency = "USD"
    [[price]]
    models = ["m"]
    rates = { fresh = 1, hit = 0.1, output = 3 }
    """
)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    records = [
        prefixed(0, "abc", BOOK, run="warmer", instance="engine-0"),
        prefixed(1, "abcd", BOOK, run="asked", instance="engine-1"),
        prefixed(2, "abcde", BOOK, run="asked", instance="engine-1", hits=4 * STRIDE),
    ]
    with Ledger(tmp_path / "ledger.sqlite3") as ledger:
        ledger.register(BOOK)
        for record in records:
            ledger.append(record)
    traces = TraceStore(tmp_path / "traces.sqlite3", TraceStoreOptions(max_age_ns=None))
    assert traces.keep(records, 30)
    traces.close()
    return ["--ledger", str(tmp_path / "ledger.sqlite3"), "--traces", str(tmp_path / "traces.sqlite3")]


def asked(places: list[str], capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, dict[str, int]]:
    assert main(["whatif", *more, *places, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {line["name"]: line for line in found["lines"]}


def test_a_run_is_told_by_itself_and_warmed_by_what_came_before(
    places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = asked(places, capsys, "asked")
    assert lines["recorded"]["requests"] == 2
    assert lines["recorded"]["hit_tokens"] == 4 * STRIDE
    assert lines["perfect"]["more_hit_tokens"] == 3 * STRIDE
    assert lines["perfect"]["more_cost_nano"] == -3 * STRIDE * 900
    assert lines["keep-1h"]["more_hit_tokens"] == 0  # the warmer ran on another instance
    assert lines["keep-1h-shared"]["more_hit_tokens"] == 3 * STRIDE


def test_what_happened_is_what_the_ledger_says(places: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = asked(places, capsys)
    assert main(["report", "--json", *places[:2]]) == 0
    (total,) = json.loads(capsys.readouterr().out)["totals"]
    assert lines["recorded"]["cost_nano"] == total["amount_nano"]
    assert lines["recorded"]["hit_tokens"] == total["hit_tokens"]


def test_policies_and_prices_are_asked_for_by_name(
    places: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "half.toml").write_text(
        'name = "h"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 0.5, hit = 0.05, output = 1.5 }\n'
    )
    lines = asked(places, capsys, "--policy", "round-robin", "--keep", "90s", "--prices", str(tmp_path / "half.toml"))
    assert {"simulated", "policy-round-robin", "keep-90s", "prices-half"} <= lines.keys()
    assert lines["prices-half"]["cost_nano"] * 2 == lines["recorded"]["cost_nano"]
    assert lines["policy-round-robin"]["more_hit_tokens"] == (
        lines["policy-round-robin"]["hit_tokens"] - lines["simulated"]["hit_tokens"]
    )


def test_a_table_for_people_and_errors_in_words(places: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", *places]) == 0
    table = capsys.readouterr().out
    assert "Perfect prefix" in table
    assert "What happened" in table
    for more, words in (
        (["none"], "there is no run"),
        (["--policy", "x"], "no policy"),
        (["--keep", "5"], "90s"),
        (["--limit", "1"], "more than 1 requests"),
        (["--until", "2001-01-01"], "no recorded request"),
    ):
        assert main(["whatif", *more, *places]) == 1
        assert words in capsys.readouterr().err
