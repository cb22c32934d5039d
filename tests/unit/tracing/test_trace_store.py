from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.samples.agent_runs import START_NS, RunShape, agent_run, plain_record
from tracing import store_lists
from tracing.errors import AmbiguousRunError, TraceStoreError, UnstorableRecord
from tracing.record import Charge, Outcome, RequestRecord, ToolCall, Usage
from tracing.store import Money, RunFilter, TraceStore, TraceStoreOptions

KEEP_ALL = TraceStoreOptions(max_age_ns=None)


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    store = TraceStore(tmp_path / "traces.sqlite3", KEEP_ALL)
    yield store
    store.close()


def put(store: TraceStore, *records: RequestRecord) -> None:
    for record in records:
        store.append(record)
    assert store.flush(30)


def test_a_run_comes_back_equal_in_step_order(store: TraceStore) -> None:
    records = agent_run()
    put(store, *reversed(records))
    assert store.run(records[0].link.run_id) == records
    assert store.record(records[3].request_id) == records[3]
    store.check()


def test_unknown_names_are_empty_answers(store: TraceStore) -> None:
    assert store.run("none") == []
    assert store.record("none") is None
    assert store.runs() == []
    assert (store.totals().requests, store.totals().money) == (0, ())


def test_a_record_appended_twice_is_stored_once(store: TraceStore) -> None:
    record = agent_run()[0]
    put(store, record, replace(record, status=500))
    assert store.run(record.link.run_id) == [record]
    assert store.totals().money == (Money("USD", record.charge.amount_nano, record.charge.saved_nano, 0),)


def test_a_record_that_comes_again_under_another_run_leaves_no_empty_run(store: TraceStore) -> None:
    one, two = agent_run(RunShape(steps=1)), agent_run(RunShape(run_id="run-2", steps=1))
    put(store, *one)
    put(store, replace(two[0], request_id=one[0].request_id))
    assert [summary.run_id for summary in store.runs()] == [one[0].link.run_id]
    store.check()


def test_a_list_is_of_one_moment_though_runs_are_forgotten_meanwhile(tmp_path: Path, store: TraceStore) -> None:
    put(store, *agent_run())
    reader = TraceStore(tmp_path / "traces.sqlite3", read_only=True)
    with reader._reading() as connection:
        (listed,) = connection.execute("SELECT tenant, run_id FROM runs").fetchall()
        with sqlite3.connect(tmp_path / "traces.sqlite3") as other:
            other.execute("DELETE FROM records")
            other.execute("DELETE FROM runs")
        assert store_lists.summary(connection, *listed).steps == len(agent_run())
    assert reader.runs() == []
    reader.close()


def test_a_summary_sums_the_records_to_the_nano(store: TraceStore) -> None:
    records = agent_run()
    records[2] = replace(records[2], outcome=Outcome.ABORTED, charge=Charge("USD", "v", unpriced_reason="no price"))
    put(store, *records, plain_record())
    (summary,) = store.runs()
    priced = [record.charge for record in records if record.charge.amount_nano is not None]
    assert summary.money == (Money("USD", sum(c.amount_nano for c in priced), sum(c.saved_nano for c in priced), 1),)
    assert summary.prompt_tokens == sum(record.usage.prompt_tokens for record in records)
    assert sum(summary.hit_tokens) == sum(record.usage.hit_tokens for record in records)
    assert summary.output_tokens == sum(record.usage.output_tokens for record in records)
    assert (summary.steps, summary.failed, summary.agent) == (len(records), 1, "support-agent")
    assert (summary.first_ns, summary.last_ns) == (records[0].stamps.arrived_ns, records[-1].stamps.arrived_ns)
    assert summary.ttft_p50_ns == sorted(record.stamps.ttft_ns for record in records)[len(records) // 2]


def test_sums_beyond_64_bits_are_exact(store: TraceStore) -> None:
    huge = 2**62 + 12345
    charge = Charge("USD", "v", amount_nano=huge, saved_nano=-huge)
    put(store, *(plain_record(f"r{n}", charge=charge) for n in range(9)))
    assert store.totals().money == (Money("USD", 9 * huge, -9 * huge, 0),)


def test_currencies_are_never_added_up(store: TraceStore) -> None:
    one, two = agent_run(RunShape(steps=2))
    put(store, one, replace(two, charge=replace(two.charge, currency="EUR")))
    assert [money.currency for money in store.runs()[0].money] == ["EUR", "USD"]


def test_runs_are_listed_newest_first_filtered_and_paged(store: TraceStore) -> None:
    shapes = [
        RunShape(run_id=f"run-{n}", steps=2, start_ns=START_NS + n * 3600 * 10**9, agent=("coder", "writer")[n % 2],
                 tenant=("a", "b")[n % 2])
        for n in range(6)
    ]  # fmt: skip
    runs = [agent_run(shape) for shape in shapes]
    runs[4][1] = replace(runs[4][1], outcome=Outcome.UPSTREAM_FAILED, model="other-model")
    put(store, *(record for run in runs for record in run))
    listed = store.runs(limit=3)
    assert [run.run_id for run in listed] == ["run-5", "run-4", "run-3"]
    rest = store.runs(limit=10, where=RunFilter(until_ns=listed[-1].last_ns))
    assert [run.run_id for run in rest] == ["run-2", "run-1", "run-0"]

    def found(where: RunFilter) -> list[str]:
        return [run.run_id for run in store.runs(where=where)]

    assert found(RunFilter(tenant="b")) == ["run-5", "run-3", "run-1"]
    assert found(RunFilter(text="CODER")) == ["run-4", "run-2", "run-0"]
    assert found(RunFilter(text="n-3")) == ["run-3"]
    assert found(RunFilter(text="%")) == []
    assert found(RunFilter(failed_only=True)) == ["run-4"]
    assert found(RunFilter(model="other-model")) == ["run-4"]
    assert found(RunFilter(since_ns=START_NS + 5 * 3600 * 10**9)) == ["run-5"]


def test_runs_of_two_tenants_with_one_name_are_two(store: TraceStore) -> None:
    mine = agent_run(RunShape(run_id="nightly", tenant="a", steps=2))
    theirs = [
        replace(record, request_id="x" + record.request_id)
        for record in agent_run(RunShape(run_id="nightly", tenant="b", steps=3))
    ]
    put(store, *mine, *theirs)
    assert store.run("nightly", "a") == mine
    assert store.run("nightly", "b") == theirs
    with pytest.raises(AmbiguousRunError) as caught:
        store.run("nightly")
    assert caught.value.tenants == ("a", "b")
    assert sorted(summary.steps for summary in store.runs()) == [2, 3]


def test_the_bound_on_records_drops_the_oldest_runs_whole(tmp_path: Path) -> None:
    options = TraceStoreOptions(max_records=25, max_age_ns=None, retention_records=1)
    store = TraceStore(tmp_path / "t.sqlite3", options)
    for n in range(10):
        put(store, *agent_run(RunShape(run_id=f"run-{n}", steps=5, start_ns=START_NS + n * 10**12)))
    assert store.count() <= 25
    assert [(run.run_id, run.steps) for run in store.runs()][:4] == [(f"run-{n}", 5) for n in (9, 8, 7, 6)]
    store.check()
    store.close()


def test_one_run_longer_than_the_bound_keeps_its_newest_steps(tmp_path: Path) -> None:
    options = TraceStoreOptions(max_records=10, max_age_ns=None, retention_records=1)
    store = TraceStore(tmp_path / "t.sqlite3", options)
    records = agent_run(RunShape(steps=30))
    for record in records:
        put(store, record)
    assert store.run(records[0].link.run_id) == records[-10:]
    store.close()


def test_records_older_than_the_bound_go(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    store = TraceStore(path, KEEP_ALL)
    now_ns = time.time_ns()
    put(store, *agent_run(RunShape(run_id="old", start_ns=now_ns - 10**15)), plain_record())
    put(store, *agent_run(RunShape(run_id="new", start_ns=now_ns)))
    store.close()
    store = TraceStore(path, TraceStoreOptions(max_age_ns=10**14))
    put(store)
    assert [run.run_id for run in store.runs()] == ["new"]
    assert store.record("req-1") is None
    store.close()


def test_a_full_queue_drops_and_counts_instead_of_waiting(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    store = TraceStore(path, TraceStoreOptions(queue_records=4, batch_records=1, max_age_ns=None))
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # the writer waits for this lock
    for n in range(20):
        store.append(plain_record(f"r{n}"))
    dropped = store.stats().dropped
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.flush(30)
    assert dropped >= 14
    assert store.count() == 20 - dropped == store.stats().appended
    store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"error": "lone \ud800 surrogate"},
        {"usage": Usage(fresh_tokens=2**70)},
        {"charge": Charge("USD", "v", amount_nano=2**63)},
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(store: TraceStore, changes: dict[str, object]) -> None:
    with pytest.raises(UnstorableRecord, match="req-1"):
        store.append(plain_record(**changes))
    put(store, plain_record("req-2"))
    assert store.count() == 1


def test_hostile_text_is_data(store: TraceStore) -> None:
    hostile = "x'; DROP TABLE records; --\0\u202e"
    record = plain_record(hostile, tool_calls=(ToolCall(hostile, hostile),), labels={"agent": hostile})
    put(store, record)
    assert store.record(hostile) == record


def test_another_process_reads_while_this_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    store = TraceStore(path, KEEP_ALL)
    reader = TraceStore(path, read_only=True)
    put(store, *agent_run())
    assert len(reader.runs()) == 1
    with pytest.raises(TraceStoreError, match="read-only"):
        reader.append(plain_record())
    reader.close()
    store.close()
    again = TraceStore(path, read_only=True)
    assert again.count() == 9
    again.close()


def test_a_file_that_is_not_a_store_is_an_error_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(TraceStoreError, match=r"t\.sqlite3"):
        TraceStore(path)
    with pytest.raises(TraceStoreError, match="missing"):
        TraceStore(tmp_path / "missing.sqlite3", read_only=True)


def test_a_store_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    TraceStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(TraceStoreError, match="schema 99"):
        TraceStore(path)


def test_what_was_committed_survives_kill_minus_nine(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    script = """
import sys
from pathlib import Path
from tests.samples.agent_runs import RunShape, agent_run
from tracing.store import TraceStore, TraceStoreOptions
store = TraceStore(Path(sys.argv[1]), TraceStoreOptions(max_age_ns=None))
for n in range(100000):
    for record in agent_run(RunShape(run_id=f"run-{n}", steps=3)):
        store.append(record)
    if store.flush(30):
        print(n, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    committed = -1
    while committed < 20:
        committed = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    committed = int(rest[-1]) if rest else committed
    store = TraceStore(path, KEEP_ALL)
    store.check()
    for n in range(committed + 1):
        assert len(store.run(f"run-{n}")) == 3
    put(store, plain_record())
    store.close()
