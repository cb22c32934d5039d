"""``keepwarm attribution`` and ``keepwarm credits`` over a trace store and a ledger on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from billing.verify import verify_ledger
from gateway.cli import main
from tests.samples.prefixed import STRIDE, prefixed
from tracing.record import RequestRecord
from tracing.store import TraceStore, TraceStoreOptions

BOOK = PriceBook.from_toml(
    """
    name = "b"
    currency = "USD"
    prefix_writes = "readers"
    [costs]
    gpu_hour = 2
    prefill_tokens_per_s = 1000
    pool_gib = 10
    pool_gib_hour = 0.001
    [lost_hit_credits]
    causes = ["routing"]
    [[allowance]]
    name = "start"
    requests = 1
    [[price]]
    models = ["m"]
    rates = { fresh = 1, hit = 0.1, output = 3 }
    """
)
RECORDS = [
    prefixed(0, "abc", BOOK, team="a", run="r1"),
    prefixed(10, "abcd", BOOK, hits=3 * STRIDE, team="b", run="r2"),
    prefixed(20, "abce", BOOK, team="a", run="r1", instance="engine-1", seen={"engine-0": 384, "engine-1": 0}),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    fill(tmp_path, RECORDS)
    return tmp_path


def fill(home: Path, records: Sequence[RequestRecord]) -> None:
    traces = TraceStore(home / "traces.sqlite3", TraceStoreOptions(max_age_ns=None))
    with Ledger(home / "ledger.sqlite3") as ledger:
        ledger.register(BOOK)
        for record in reversed(records):  # stored as they end, not as they arrive
            ledger.append(record)
            traces.append(record)
    assert traces.close()


def words(home: Path, *more: str) -> list[str]:
    return [*more, "--ledger", str(home / "ledger.sqlite3"), "--traces", str(home / "traces.sqlite3")]


def test_the_tables_say_who_read_what_and_what_was_lost(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(home, "attribution")) == 0
    text = capsys.readouterr().out
    assert "3 requests, 0 of them" in text
    assert "routing" in text
    assert "0.000345600" in text  # 384 tokens at 0.9 a million
    assert "Prefixes that saved most" in text


def test_json_with_a_baseline(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(home, "attribution", "--json", "--by", "run", "--baseline", "round-robin")
    assert main([*command, "--baseline-instances", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flows"][0] | {"transfer_nano": 0} == {
        "writer": "r1", "reader": "r2", "currency": "USD", "tokens": 384, "saved_nano": 345_600, "transfer_nano": 0,
    }  # fmt: skip
    (total,) = found["baseline"]["totals"]
    assert total["hit_tokens"] == 384
    assert total["baseline_hit_tokens"] == 768
    assert total["saved_beyond_baseline_nano"] == -384 * 900
    assert total["cost_nano"] == sum(record.charge.amount_nano or 0 for record in RECORDS)
    assert found["baseline"]["tier_cost_nano"]["USD"] > 0


def test_the_baseline_as_a_table_and_in_a_report(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(home, "attribution", "--baseline", "round-robin")) == 0
    assert "Against round-robin on 2 instances" in capsys.readouterr().out
    assert main([*words(home, "report", "--baseline", "round-robin"), "--by", "team"]) == 0
    text = capsys.readouterr().out
    assert "Against round-robin on 2 instances" in text
    assert "net of" in text


def test_what_was_restarted_is_named_by_the_caller(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(home, "attribution"), "--restart", "engine-0"]) == 1
    assert "write INSTANCE=TIME" in capsys.readouterr().err


def test_credits_are_not_taken_back_because_traces_are_gone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(home, "credits", "lost-hits", "2026-09")) == 0
    (home / "traces.sqlite3").unlink()
    traces = TraceStore(home / "traces.sqlite3", TraceStoreOptions(max_age_ns=None))
    traces.append(RECORDS[0])
    assert traces.close()
    capsys.readouterr()
    assert main(words(home, "credits", "lost-hits", "2026-09")) == 1
    assert "the traces of 2 of the month's 3 requests are gone" in capsys.readouterr().err
    assert main([*words(home, "credits", "lost-hits", "2026-09"), "--partial"]) == 0
    assert "nothing to post" in capsys.readouterr().out


def test_credits_are_posted_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = home / "ledger.sqlite3"
    lost = words(home, "credits", "lost-hits", "2026-09")
    assert main([*lost, "--dry-run"]) == 0
    assert "1 credit, together 0.000345600 USD" in capsys.readouterr().out
    assert verify_ledger(ledger).rows == 3
    settle = ["credits", "settle", "2026-09", "--ledger", str(ledger)]
    for command in (lost, settle):
        assert main(command) == 0
        assert "1 credit," in capsys.readouterr().out
        assert main(command) == 0
        assert "nothing to post" in capsys.readouterr().out
    assert main(["credits", "list", "--ledger", str(ledger)]) == 0
    listed = capsys.readouterr().out
    assert "lost_hits routing  2026-09" in listed
    assert "allowance start  2026-09" in listed
    free = RECORDS[0].charge.amount_nano or 0
    with LedgerReader(ledger) as reader:
        (total,) = reader.totals()
    assert total.amount_nano == sum(r.charge.amount_nano or 0 for r in RECORDS) - free - 345_600
    assert verify_ledger(ledger).faults == []
    assert main(["credits", "settle", "November", "--ledger", str(ledger)]) == 1
    assert "is no month" in capsys.readouterr().err
