"""The ledger against an engine's counters and a provider's invoice."""

from __future__ import annotations

import argparse
import csv
from decimal import Decimal
from pathlib import Path

import pytest

from billing.errors import ReconcileError
from billing.ledger import Ledger
from billing.prices import PriceBook
from billing.reconcile import InvoiceColumns, engine_counts, read_invoice, with_engine
from billing.reports import Sums
from gateway.commands import reconcile
from tests.samples.billed import many

RECORDS = many(20)
ENGINE_1 = [record for record in RECORDS if record.instance == "engine-1"]

METRICS = {
    "sglang": """
# TYPE sglang:num_requests counter
sglang:num_requests_total{model_name="m"} %(requests)d
# TYPE sglang:prompt_tokens counter
sglang:prompt_tokens_total{model_name="m",engine="0"} 7
sglang:prompt_tokens_total{model_name="m",engine="1"} %(prompt)d
# TYPE sglang:cached_tokens counter
sglang:cached_tokens_total{model_name="m"} %(hit)d
# TYPE sglang:generation_tokens counter
sglang:generation_tokens_total{model_name="m"} %(output)d
""",
    "vllm": """
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="stop"} %(requests)d
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total 7
vllm:prompt_tokens_total{engine="1"} %(prompt)d
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total %(hit)d
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total %(output)d
""",
}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("reconcile") / "ledger.sqlite3"
    with Ledger(path) as opened:
        opened.register(PriceBook.default())
        for record in RECORDS:
            opened.append(record)
    return str(path)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    reconcile.add_arguments(parser)
    return reconcile.run(parser.parse_args(words))


@pytest.mark.parametrize("engine", METRICS)
@pytest.mark.parametrize("off", [0, 1])
def test_an_engines_counters(
    engine: str, off: int, ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = {"requests": 100, "prompt": 1000, "hit": 10, "output": 50}
    rise = {
        "requests": len(ENGINE_1),
        "prompt": sum(record.usage.prompt_tokens for record in ENGINE_1),
        "hit": sum(record.usage.hit_tokens for record in ENGINE_1) + off,
        "output": sum(record.usage.output_tokens for record in ENGINE_1),
    }
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(METRICS[engine] % begin)
    after.write_text(METRICS[engine] % {name: begin[name] + rise[name] for name in begin})
    words = ("engine", "--ledger", ledger, "--instance", "engine-1", "--before", str(before), "--after", str(after))
    assert run(*words) == off
    said = capsys.readouterr().out
    assert f"{off} of 4 differ" in said
    assert ("differs by +1" in said) == bool(off)
    assert run(*words, "--tolerance", "0.01") == 0


def test_an_engine_that_was_restarted_is_told() -> None:
    with pytest.raises(ReconcileError, match="restarted"):
        with_engine(Sums(), {"prompt_tokens": 10}, {"prompt_tokens": 3})
    with pytest.raises(ReconcileError, match="none of the counters"):
        engine_counts("up 1\n")


def write_invoice(path: Path, change: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Usage Date", "Model", "Amount", "Input"])
        for record in RECORDS:
            cost = Decimal((record.charge.amount_nano or 0) + change).scaleb(-9)
            writer.writerow(["2026-09-21", record.served_model, f"{cost:f}", f"{record.usage.prompt_tokens:,}"])


@pytest.mark.parametrize("change", [0, 1])
def test_an_invoice(change: int, ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "invoice.csv"
    write_invoice(path, change)
    words = ("invoice", str(path), "--ledger", ledger, "--day-column", "Usage Date", "--model-column", "Model")
    words = (*words, "--cost-column", "Amount", "--prompt-tokens-column", "Input")
    assert run(*words) == change
    assert (f"differs by +0.0000000{2 * change}0"[:-1] in capsys.readouterr().out) == bool(change)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "invoice.csv"
    path.write_text("date,model,cost\n2026-11-01,m,much\n")
    with path.open() as file, pytest.raises(ReconcileError, match="line 2"):
        read_invoice(file, InvoiceColumns())
    with path.open() as file, pytest.raises(ReconcileError, match="no column Amount"):
        read_invoice(file, InvoiceColumns(cost="Amount"))
