"""The ledger against an engine's counters and a provider's invoice."""

from __future__ import annotations

import argparse
import csv
import io
import json
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from billing.errors import ReconcileError
from billing.ledger import Ledger
from billing.prices import PriceBook
from billing.reconcile import InvoiceColumns, engine_counts, read_invoice, with_engine
from billing.reports import Sums
from billing.usage import openai_usage
from gateway.commands import reconcile
from tests.samples.billed import billed, died_in_flight, many
from tracing.record import Attempt, HitSource, Usage, UsageSource

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


CAPTURES = Path(__file__).parents[2] / "captures"


def test_a_real_sglangs_counters_agree_with_the_requests_that_made_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recording's 15 requests, as rows: the same sums, hits by tier included; then one token more on the host."""
    counts = engine_counts((CAPTURES / "sglang_metrics_hicache_0.5.23.txt").read_text())
    assert counts == {
        "requests": 15, "prompt_tokens": 5341, "hit_tokens": 1008, "output_tokens": 47,
        "device hits": 368, "host hits": 320, "storage hits": 320,
    }  # fmt: skip
    tiers = [(368, 0, 0), (0, 320, 0), (0, 0, 320)] + [(0, 0, 0)] * 12
    path, book = tmp_path / "ledger.sqlite3", PriceBook.default()
    with Ledger(path) as opened:
        for number, (device, host, disk) in enumerate(tiers):
            usage = Usage(
                fresh_tokens=(5341 - 1008) // 15 + (number < (5341 - 1008) % 15),
                hit_device_tokens=device, hit_host_tokens=host, hit_disk_tokens=disk,
                output_tokens=47 // 15 + (number < 47 % 15), source=UsageSource.ENGINE, hit_source=HitSource.REPORTED,
            )  # fmt: skip
            opened.append(replace(billed(number, book, usage=usage), attempts=(Attempt("sgl", 0, 1, 200),)))
    after = str(CAPTURES / "sglang_metrics_hicache_0.5.23.txt")
    words = ("engine", "--ledger", str(path), "--instance", "sgl", "--after", after)
    assert run(*words) == 0
    assert "0 of 7 differ" in capsys.readouterr().out
    wrong = tmp_path / "after"
    host = 'cache_source="host",engine_type="unified",model_name="tiny"} 32'
    wrong.write_text(Path(after).read_text().replace(f"{host}0", f"{host}1"))
    assert run(*words[:-1], str(wrong)) == 1
    said = capsys.readouterr().out
    assert "host hits" in said
    assert "differs by +1" in said


def test_a_real_sglang_without_lower_tiers() -> None:
    counts = engine_counts((CAPTURES / "sglang_metrics_0.5.23.txt").read_text())
    assert (counts["requests"], counts["prompt_tokens"], counts["hit_tokens"]) == (5, 365, 80)
    assert (counts["device hits"], counts["host hits"]) == (80, 0)


def test_a_real_vllms_counters_agree_with_what_its_answers_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eleven answers' usage as rows, its counters before and after them; then one token more than it counted."""
    before, after = (CAPTURES / f"vllm_metrics_{name}_0.32.0.txt" for name in ("before", "after"))
    usages = json.loads((CAPTURES / "vllm_usages_0.32.0.json").read_text())
    path, book = tmp_path / "ledger.sqlite3", PriceBook.default()
    with Ledger(path) as opened:
        for number, told in enumerate(usages):
            usage = openai_usage(told, silence_is_zero=True).usage
            opened.append(replace(billed(number, book, usage=usage), attempts=(Attempt("v", 0, 1, 200),)))
    words = ("engine", "--ledger", str(path), "--instance", "v", "--before", str(before), "--after")
    assert run(*words, str(after)) == 0
    said = capsys.readouterr().out
    assert "ledger 6422  other 6422" in said
    assert "ledger 4800  other 4800" in said
    assert "0 of 4 differ" in said  # its answers tell no tiers, so none are compared
    wrong, line = tmp_path / "after", 'vllm:generation_tokens_total{engine="0",model_name="tiny"} '
    wrong.write_text(after.read_text().replace(f"{line}79", f"{line}80"))
    assert run(*words, str(wrong)) == 1
    assert "differs by +1" in capsys.readouterr().out


def test_a_real_vllms_hits_by_source() -> None:
    counts = engine_counts((CAPTURES / "vllm_metrics_after_0.32.0.txt").read_text())
    assert counts == {
        "requests": 11, "prompt_tokens": 6422, "hit_tokens": 4800, "output_tokens": 79,
        "device hits": 3552, "host hits": 1248, "storage hits": 0,
    }  # fmt: skip
    assert set(engine_counts((CAPTURES / "vllm_metrics_before_0.32.0.txt").read_text()).values()) == {0}
    split = Sums(requests=11, hit_device_tokens=3552, hit_host_tokens=1248)
    assert all(line.agrees(Decimal(0)) for line in with_engine(split, {}, counts) if line.what.endswith(" hits"))


def test_vllms_hits_by_source_and_hits_without_one() -> None:
    text = """
# TYPE vllm:prompt_tokens_cached counter
vllm:prompt_tokens_cached_total 100
# TYPE vllm:prompt_tokens_cached_by_source counter
vllm:prompt_tokens_cached_by_source_total{source="device"} 60
vllm:prompt_tokens_cached_by_source_total{source="host"} 30
vllm:prompt_tokens_cached_by_source_total{source="disk"} 4
vllm:prompt_tokens_cached_by_source_total{source="p2p"} 6
"""
    counts = engine_counts(text)
    assert (counts["device hits"], counts["host hits"], counts["storage hits"]) == (60, 30, 10)
    assert "device hits" not in engine_counts(text.replace("cached_total 100", "cached_total 101"))
    sums = Sums(hit_device_tokens=60, hit_host_tokens=30, hit_pool_tokens=10)
    assert all(line.agrees(Decimal(0)) for line in with_engine(sums, {}, counts) if "hits" in line.what)
    untold = Sums(hit_unknown_tokens=100)
    assert not any("hits" in line.what for line in with_engine(untold, {}, counts))


def test_the_gateways_counts_beside_the_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, book = tmp_path / "ledger.sqlite3", PriceBook.default()
    agreeing = [replace(record, gateway_prompt_tokens=record.usage.prompt_tokens) for record in RECORDS[:6]]
    with Ledger(path) as opened:
        for record in agreeing:
            opened.append(record)
    assert run("counts", "--ledger", str(path)) == 0
    off = replace(billed(50, book), gateway_prompt_tokens=billed(50, book).usage.prompt_tokens + 7)
    clamped = replace(billed(51, book), usage_problems=("hits_exceed_prompt: 9 hits in a prompt of 8",))
    with Ledger(path) as opened:
        for record in (off, clamped, died_in_flight(52, book)):
            opened.append(record)
    capsys.readouterr()
    assert run("counts", "--ledger", str(path)) == 1
    said = capsys.readouterr().out
    assert "req-50" in said
    assert "hits_exceed_prompt 1" in said
    assert "those without counts" in said


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
    for line, why in (
        ("2026-11-01,m,NaN", "line 2 .*cost is 'NaN'"),
        ("2026-11-01,m,1e999999", "line 2 .*cost is '1e999999'"),
        ("2026-11-01,m", "line 2 .*cost is missing"),
        ("m" * 200_000, "line 2 .*field limit"),
    ):
        with pytest.raises(ReconcileError, match=why):
            read_invoice(io.StringIO(f"date,model,cost\n{line}\n"), InvoiceColumns())


@pytest.mark.parametrize("share", ["abc", "nan", "-1", "inf", "2"])
def test_a_tolerance_is_a_share(ledger: str, share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("counts", "--ledger", ledger, "--tolerance", share) == 1
    assert f"--tolerance {share}: it is a share" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("invoice",), ("engine", "--instance", "a", "--after")])
def test_a_file_in_another_encoding_is_told(
    tmp_path: Path, ledger: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs"
    path.write_text("date,model,cost\n", "utf-16")
    assert run(*words, str(path), "--ledger", ledger) == 1
    assert "theirs is no text in UTF-8" in capsys.readouterr().err
