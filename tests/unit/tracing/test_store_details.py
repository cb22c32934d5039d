"""Details beside records, received spans, and stores of an older schema."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.samples.agent_runs import RunShape, agent_run, plain_record
from tracing.detail import BreakKind, Comparison, PromptChange, Reproduction, StepDetail, decode_detail, encode_detail
from tracing.errors import TraceStoreError
from tracing.received import ReceivedSpan
from tracing.store import TraceStore, TraceStoreOptions
from tracing.store_schema import COLUMNS, row_of

CHANGE = PromptChange(
    BreakKind.UUID, "system", "messages[0].content", 1, 37, 1, 37, "a", "b", 1, 900, 1000, also=("x",)
)


def detail(request_id: str) -> StepDetail:
    made = Reproduction("m", "w", "sglang 1", "e0", "chatml@1", 7, {"temperature": 0.5, "n": 1}, "p", "t", "s")
    return StepDetail(request_id, Comparison.CHANGED, made, "before", CHANGE, ("seed",))


def test_a_detail_comes_back_as_it_was_and_goes_with_its_record(tmp_path: Path) -> None:
    assert decode_detail(encode_detail(detail("r"))) == detail("r")
    store = TraceStore(tmp_path / "t.sqlite3", TraceStoreOptions(max_records=4, max_age_ns=None, retention_records=1))
    records = [record for seed in range(3) for record in agent_run(RunShape(run_id=f"run-{seed}", seed=seed, steps=3))]
    records = [replace(record, request_id=f"r{number}") for number, record in enumerate(records)]
    for record in records:
        store.append(record)
        store.describe(detail(record.request_id))
    store.describe(detail("nobody"))
    assert store.flush(10)
    kept = [record.request_id for record in store.recent(10)]
    found = store.details([record.request_id for record in records])
    assert kept
    assert sorted(found) == sorted(kept)
    assert store.detail(kept[-1]) == detail(kept[-1])
    assert store.detail("nobody") is None
    store.check()
    store.close()


def test_received_spans_are_bounded_and_sent_twice_are_one(tmp_path: Path) -> None:
    options = TraceStoreOptions(max_spans=3, max_age_ns=None, retention_records=1)
    store = TraceStore(tmp_path / "t.sqlite3", options)
    records = agent_run()
    assert records[0].link is not None
    name = {"keepwarm.run.id": records[0].link.run_id}
    for number in range(8):
        span = ReceivedSpan("a" * 32, f"{number + 1:016x}", None, f"s{number}", 1, number, number, attributes=name)
        assert store.receive("default", [span, span], time.time_ns() + number)
    store.append(records[0])
    assert store.flush(10)
    store.append(records[1])
    assert store.flush(10)
    assert [span.name for span in store.spans_of(records)] == ["s5", "s6", "s7"]
    store.close()


FIRST_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY,
    request_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    run_id TEXT,
    step INTEGER,
    arrived_ns INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    model TEXT NOT NULL,
    agent TEXT,
    hit_device_tokens INTEGER NOT NULL,
    hit_host_tokens INTEGER NOT NULL,
    hit_disk_tokens INTEGER NOT NULL,
    hit_pool_tokens INTEGER NOT NULL,
    hit_unknown_tokens INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    ttft_ns INTEGER,
    currency TEXT NOT NULL,
    cost_nano INTEGER,
    saved_nano INTEGER,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS records_by_run ON records (tenant, run_id, step, seq) WHERE run_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS records_by_time ON records (arrived_ns);
CREATE TABLE IF NOT EXISTS runs (
    tenant TEXT NOT NULL,
    run_id TEXT NOT NULL,
    last_ns INTEGER NOT NULL,
    PRIMARY KEY (tenant, run_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS runs_by_time ON runs (last_ns);
"""
SECOND_SCHEMA = (
    "ALTER TABLE records ADD COLUMN detail BLOB;"
    + """
CREATE TABLE IF NOT EXISTS spans (
    tenant TEXT NOT NULL,
    trace_id TEXT NOT NULL,
    span_id TEXT NOT NULL,
    run_id TEXT,
    tool_call_id TEXT,
    received_ns INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (tenant, trace_id, span_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS spans_by_run ON spans (tenant, run_id) WHERE run_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS spans_by_call ON spans (tenant, tool_call_id) WHERE tool_call_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS spans_by_time ON spans (received_ns);
"""
)


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_of_an_older_schema_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    path, record = tmp_path / "old.sqlite3", agent_run()[0]
    link = structs.replace(record.link, parent_run_id="above", parent_request_id="req-9", parent_call_id="call-1")
    record = replace(record, link=link)
    old = sqlite3.connect(path)
    old.executescript(FIRST_SCHEMA + (SECOND_SCHEMA if version == 2 else ""))
    old.execute(f"PRAGMA user_version = {version}")
    names = [name for name in COLUMNS.split(", ") if not name.startswith("parent_") and name != "team"]
    values = dict(zip(COLUMNS.split(", "), row_of(record), strict=True))
    old.execute(
        f"INSERT INTO records ({', '.join(names)}) VALUES (?{', ?' * (len(names) - 1)})",
        [values[name] for name in names],
    )
    old.execute("INSERT INTO runs VALUES (?, ?, ?)", (record.identity.tenant, link.run_id, record.stamps.arrived_ns))
    old.commit()
    old.close()
    with pytest.raises(TraceStoreError, match="next start"):
        TraceStore(path, read_only=True)
    store = TraceStore(path, TraceStoreOptions(max_age_ns=None))
    store.append(plain_record())
    store.describe(detail("req-1"))
    assert store.flush(10)
    assert store.detail("req-1") == detail("req-1")
    assert store.choices(None).teams == tuple(sorted({record.identity.team, plain_record().identity.team}))
    assert [call.parent_call_id for call in store.called_runs(record.identity.tenant, 0, 2**62)] == ["call-1"]
    store.check()
    store.close()
    reader = TraceStore(path, read_only=True)
    assert reader.detail("req-1") is not None
    reader.close()
