"""What the trace command compares, follows, sums up and exports; each export read back by what it is made for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from billing.prices import PriceBook
from gateway.commands import doctor, trace
from gateway.replay.formats import read_trace
from gateway.trace_files import chrome_trace, otlp_json, workload
from tests.samples.agent_runs import agent_run
from tests.samples.prefixed import STRIDE, prefixed
from tracing.analysis import PHASES, Objectives, analyze, critical_path, percentile, phases
from tracing.content import ContentPolicy
from tracing.detail import Comparison, Reproduction, StepDetail
from tracing.received import ReceivedSpan, read_json
from tracing.spans import request_spans
from tracing.store import TraceStore, TraceStoreOptions

BOOK = PriceBook.from_toml(
    'name = "b"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 1, output = 3 }\n'
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "traces.sqlite3"
    store = TraceStore(path, TraceStoreOptions(max_age_ns=None))
    for record in agent_run():
        store.append(record)
        store.describe(StepDetail(record.request_id, Comparison.FIRST, Reproduction(instance=record.instance)))
    assert store.flush(30)
    store.close()
    return path


def command(path: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return trace.run(parser.parse_args(["--store", str(path), *words]))


def test_otlp_json_is_read_back_span_for_span() -> None:
    records = agent_run()
    call = next(call for record in records for call in record.tool_calls)
    theirs = ReceivedSpan("a" * 32, "b" * 16, None, "execute_tool", 1, 1, 2, "agent",
                          {"gen_ai.tool.call.id": call.id, "n": 3, "ok": True, "x": 0.5})  # fmt: skip
    spans, left_out = read_json(otlp_json(records, [theirs]), ContentPolicy.FULL)
    assert left_out == 0
    own = {f"{span.span_id:016x}": span for record in records for span in request_spans(record)}
    found = {span.span_id: span for span in spans}
    assert own.keys() <= found.keys()
    assert all(found[id_].started_ns == span.started_ns for id_, span in own.items())
    assert found["b" * 16] == theirs
    assert [span.span_id for span in spans if span.tool_call_id == call.id] == ["b" * 16]


def test_trace_events_cover_every_step() -> None:
    records = agent_run()
    events = json.loads(chrome_trace(records))["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(steps) == len(records)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert sum(event["args"]["prompt_tokens"] for event in steps) == sum(r.usage.prompt_tokens for r in records)


def test_a_workload_is_what_replay_reads(tmp_path: Path) -> None:
    records = [prefixed(n, "abc"[: n + 1], BOOK, run="r", previous=n - 1 if n else None) for n in range(3)]
    file = tmp_path / "w.jsonl"
    file.write_bytes(b"".join(workload(records, "w")))
    header, rows = read_trace(file)
    assert (header.format, header.block_tokens, header.closed) == ("keepwarm-requests-1", STRIDE, False)
    found = list(rows)
    assert [row.prompt_tokens for row in found] == [record.usage.prompt_tokens for record in records]
    assert [len(row.blocks) for row in found] == [1, 2, 3]
    assert found[1].blocks == found[2].blocks[:2]
    assert {row.session for row in found} == {0}


def test_the_critical_path_is_the_runs_time() -> None:
    records = agent_run()
    spent = critical_path(records)
    assert sum(spent.values()) == records[-1].stamps.closed_ns - records[0].stamps.arrived_ns
    assert spent["tool"] > 0
    assert all(sum(phases(r).values()) == r.stamps.closed_ns - r.stamps.arrived_ns for r in records)
    assert critical_path([]) == dict.fromkeys(PHASES, 0)


def test_an_analysis_counts_each_record_once() -> None:
    records = agent_run()
    found = analyze(records, Objectives(ttft_ns=0), most=2)
    (agent,) = found.agents
    assert (agent.count, agent.good, found.runs) == (len(records), 0, 1)
    assert agent.cost_nano == {"USD": sum(record.charge.amount_nano or 0 for record in records)}
    assert sum(tool.count for tool in found.tools) == sum(len(r.tool_calls) for r in records[:-1])
    assert found.slowest[0].stamps.closed_ns - found.slowest[0].stamps.arrived_ns == max(agent.durations_ns)
    assert [percentile([1, 2, 3, 4], share) for share in (0.5, 0.95, 0.0)] == [2, 4, 1]
    assert percentile([], 0.5) is None


def test_two_steps_are_shown_side_by_side(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, "diff", "last:1", "run-7f3a90c2:6") == 0
    out = capsys.readouterr().out
    assert "run-7f3a90c2:1" in out
    assert "≠ instance" in out
    assert command(path, "diff", "last:1", "last:99") == 1
    assert "there is no step 'last:99'" in capsys.readouterr().err


def test_the_store_is_followed_and_summed_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, "tail", "--back", "3", "--count", "3") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        f"id={record.request_id}" for record in agent_run()[-3:]
    ]
    assert command(path, "analyze", "--since", "999999d", "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == len(agent_run())
    assert command(path, "analyze", "--since", "999999d") == 0
    assert "critical path:" in capsys.readouterr().out
    assert command(path, "show", "last", "--tree") == 0
    assert "≤" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["jsonl", "otlp", "perfetto", "requests"])
def test_every_export_is_written_to_a_file(path: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / "out"
    assert command(path, "export", "last", "--format", form, "--output", str(file)) == 0
    lines = file.read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    assert len(lines) == {"jsonl": len(agent_run()), "requests": 0}.get(form, 1)  # these prompts have no marks


@pytest.mark.parametrize(
    "words",
    [("list", "--limit", "-1"), ("list", "--limit", "x"), ("show", "r", "--width", "0"), ("tail", "--count", "0"),
     ("export", "--format", "csv"), ("list", "--since", "soon")],
)  # fmt: skip
def test_what_means_nothing_is_refused(path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command(path, *words)
    assert refused.value.code == 2
    assert "argument" in capsys.readouterr().err


def test_the_doctor_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--home", str(tmp_path)])) == 1
    assert "there is no trace store" in capsys.readouterr().err
