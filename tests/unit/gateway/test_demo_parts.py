"""The demonstration's parts: its tools really work, and its summary notices every promise that was not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.demo.desk import PLAN, TOOLS, Desk
from gateway.demo.summary import broken_promises, run_summary
from tracing.record import (
    Attempt,
    Charge,
    Identity,
    Outcome,
    RequestRecord,
    RunLink,
    Stamps,
    ToolCall,
    Usage,
)


def test_desk_tools_read_the_files_and_notes_are_written(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert json.loads(desk.call("list_files", "{}")) == {"orders.csv": 7, "prices.csv": 4, "stock.csv": 4}
    assert json.loads(desk.call("sum_quantity", '{"file": "orders.csv"}')) == {"pieces": 58}
    assert json.loads(desk.call("who_ordered", '{"item": "lamp"}')) == ["Alder", "Cedar", "Elm"]
    assert json.loads(desk.call("count_item", '{"item": "desk"}')) == {"ordered": 3}
    assert json.loads(desk.call("stock_of", '{"item": "desk"}')) == {"desk": 2}
    desk.call("write_note", '{"title": "short", "number": 1}')
    assert (tmp_path / "notes.txt").read_text() == "short: 1\n"


@pytest.mark.parametrize("arguments", ["", "[]", '{"file": "secrets.csv"}', '{"wrong": 1}'])
def test_a_wrong_argument_is_an_error_text(tmp_path: Path, arguments: str) -> None:
    assert "error" in json.loads(Desk(tmp_path).call("sum_quantity", arguments))


def test_the_plan_names_tools_that_exist() -> None:
    assert set(PLAN) <= {tool["function"]["name"] for tool in TOOLS}


def record(step: int, prompt: int, **hits: int) -> RequestRecord:
    usage = Usage(fresh_tokens=prompt - sum(hits.values()), output_tokens=9, **hits)
    return RequestRecord(
        request_id=f"r{step}",
        endpoint="chat",
        model="m",
        served_model="m",
        identity=Identity("t", "t", "k"),
        stream=True,
        stamps=Stamps(arrived_ns=0, first_token_ns=50_000_000, closed_ns=60_000_000),
        outcome=Outcome.OK,
        status=200,
        usage=usage,
        charge=Charge("USD", "v1", amount_nano=100 + step, saved_nano=7),
        link=RunLink("run", step, "header", 1.0),
        attempts=(Attempt("a", 0, 1, 200),),
        tool_calls=(ToolCall("call_1", "stock_of"),),
    )


def good_run() -> list[RequestRecord]:
    return [
        record(1, 1000),
        record(2, 1050, hit_device_tokens=992),
        record(3, 1100, hit_disk_tokens=1040),
        record(4, 1150, hit_pool_tokens=1088),
    ]


def summary_of(records: list[RequestRecord], ledger: dict[str, int | None] | None = None) -> dict[str, Any]:
    amounts = {r.request_id: r.charge.amount_nano for r in records}
    return run_summary("m", "run", records, {"r1": record(1, 1000)}, amounts if ledger is None else ledger)


def test_the_summary_covers_all_steps_and_keeps_the_last_two_apart() -> None:
    summary = summary_of(good_run())
    assert [s["step"] for s in summary["steps"]] == [1, 2]
    assert (summary["restart_step"]["step"], summary["new_instance_step"]["step"]) == (3, 4)
    assert summary["totals"] == {
        "ledger_nano": 410,
        "trace_nano": 410,
        "hit_tokens": 992 + 1040 + 1088,
        "prompt_tokens": 4300,
    }
    assert summary["steps"][0]["cold_ttft_ms"] == 50.0
    assert summary["steps"][1]["cold_ttft_ms"] is None
    assert broken_promises(summary, 16) == []


def test_every_broken_promise_is_named() -> None:
    records = good_run()
    records[1] = record(2, 1050, hit_device_tokens=976)
    records[2] = record(3, 1100, hit_host_tokens=1040)
    records[3] = record(4, 1150, hit_device_tokens=1088)
    problems = broken_promises(summary_of(records, {"r1": 1, "r2": 2, "r3": 3, "r4": None}), 16)
    assert len(problems) == 4
    assert "step 2 hit 976" in problems[0]
