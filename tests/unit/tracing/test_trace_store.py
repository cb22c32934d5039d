from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples.agent_runs import agent_run, plain_record, put
from tracing import store_lists
from tracing.errors import TraceStoreError
from tracing.store import TraceStore, TraceStoreOptions

KEEP_ALL = TraceStoreOptions(max_age_ns=None)


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    store = TraceStore(tmp_path / "traces.sqlite3", KEEP_ALL)
    yield store
    store.close()


def test_a_list_is_of_one_moment_though_runs_are_forgotten_meanwhile(tmp_path: Path, store: TraceStore) -> None:
    put(store, *agent_run())
    reader = TraceStore(tmp_path / "traces.sqlite3", read_only=True)
    with reader._database.reading() as session:
        (listed,) = session.query("SELECT tenant, run_id FROM runs")
        with sqlite3.connect(tmp_path / "traces.sqlite3") as other:
            other.execute("DELETE FROM records")
            other.execute("DELETE FROM runs")
        assert store_lists.summary(session, *listed).steps == len(agent_run())
    assert reader.runs() == []
    reader.close()


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
