from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gateway.commands import trace
from gateway.console.formats import money
from gateway.console.terminal import run_waterfall
from tests.samples.agent_runs import RunShape, agent_run
from tracing.record import Outcome, RequestRecord, ToolCall
from tracing.store import TraceStore, TraceStoreOptions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "traces.sqlite3"
    store = TraceStore(path, TraceStoreOptions(max_age_ns=None))
    for shape in (
        RunShape(),
        RunShape(run_id="run-late", seed=2, steps=3, start_ns=1_800_000_000 * 10**9, agent="late"),
    ):
        for record in agent_run(shape):
            store.append(record)
    assert store.flush(30)
    store.close()
    return path


def command(path: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return trace.run(parser.parse_args(["--store", str(path), *words]))


def test_list_shows_the_newest_first_with_exact_money(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["RUN", "AGENT"]
    assert [line.split()[0] for line in lines[1:]] == ["run-late", "run-7f3a90c2"]
    assert str(money(sum(record.charge.amount_nano for record in agent_run()), "USD")) in lines[2]
    assert command(path, "list", "--search", "LATE", "--limit", "5") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert command(path, "list", "--failed") == 0
    assert capsys.readouterr().out == "no run matches\n"


def test_show_draws_every_step_and_the_totals(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, "show", "run-7f3a90c2", "--width", "140") == 0
    out = capsys.readouterr().out
    records = agent_run()
    for record in records:
        assert str(money(record.charge.amount_nano, "USD")) in out
    assert f"cost {money(sum(record.charge.amount_nano for record in records), 'USD')}" in out
    assert "2 attempts" in out
    assert "\x1b" not in out
    steps = [line for line in out.splitlines() if line[:4].strip().isdigit()]
    assert len(steps) == len(records)
    assert {len(line) for line in steps} == {140}


def test_last_is_the_most_recent_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, "show", "last", "--colour", "always") == 0
    out = capsys.readouterr().out
    assert out.startswith("run-late")
    assert "\x1b[38;5;" in out


def test_export_is_lossless(path: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def read(body: bytes) -> list[RequestRecord]:
        return [msgspec.json.decode(line, type=RequestRecord) for line in body.splitlines()]

    assert command(path, "export", "run-7f3a90c2") == 0
    assert read(capsysbinary.readouterr().out) == agent_run()
    everything = tmp_path / "all.jsonl"
    assert command(path, "export", "--output", str(everything)) == 0
    assert len(read(everything.read_bytes())) == 12


@pytest.mark.parametrize("words", [["show", "none"], ["export", "none"]])
def test_a_run_that_is_not_there_is_an_error(path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, *words) == 1
    assert "'none'" in capsys.readouterr().err


def test_a_store_that_is_not_there_is_an_error_and_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "none.sqlite3", "list") == 1
    assert "none.sqlite3" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_names_cannot_command_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\n"
    record = agent_run(RunShape(steps=1, agent=evil))[0]
    record = replace(record, model=evil, tool_calls=(ToolCall("c", evil),), outcome=Outcome.ABORTED, error=evil)
    out = run_waterfall([record])
    assert not {"\x1b", "\x07", "\r"} & set(out)


def test_the_waterfall_is_as_wide_as_asked_and_never_narrower_than_it_can_be() -> None:
    for width in (10, 100, 200):
        steps = [line for line in run_waterfall(agent_run(), width=width).splitlines() if line[:4].strip().isdigit()]
        assert {len(line) for line in steps} == {max(width, 94)}
