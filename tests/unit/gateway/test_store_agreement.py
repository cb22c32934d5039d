"""The trace store and the ledger agree on every request, also on those whose process died; what is lost is told."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from billing.counters import LedgerCounters
from billing.entry import entry_of
from billing.journal import Segment
from billing.ledger import Ledger, LedgerOptions
from billing.postgres.database import postgres_database
from billing.prices import PriceBook
from billing.row import LedgerRow, record_of, row_of, row_values
from gateway.ledger_metrics import LedgerCollector
from gateway.recovery import TraceFollower
from gateway.store_metrics import StoreCollector
from tests.samples.agent_runs import plain_record
from tests.samples.billed import altered, billed, died_in_flight, many, unpriced
from tracing.export import SpanExport, SpanExportOptions
from tracing.record import Outcome
from tracing.store import TraceStore, TraceStoreOptions

KEEP_ALL = TraceStoreOptions(max_age_ns=None)
QUICK = LedgerOptions(commit_window_s=0.001, adopt_interval_s=0.01, segment_bytes=1)


def metrics(*collectors: StoreCollector | LedgerCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def test_a_record_made_from_a_row_has_the_same_row() -> None:
    book = PriceBook.default()
    for record in (
        *many(20),
        unpriced(3, book),
        died_in_flight(4, book),
        altered(billed(5, book), link=None, labels={}),
    ):
        assert row_of(record_of(row_of(record))) == row_of(record)


def test_requests_that_died_and_requests_not_yet_traced_get_their_traces(tmp_path: Path) -> None:
    path, book = tmp_path / "ledger.sqlite3", PriceBook.default()
    traces = TraceStore(tmp_path / "traces.sqlite3", KEEP_ALL)
    Ledger(path, QUICK).start().close()
    dead = Segment(tmp_path / "ledger.sqlite3.journal")
    for number in range(4):
        dead.append(entry_of(row_values(died_in_flight(number, book)), is_admission=True)[1])
    for number in (0, 2):
        dead.append(entry_of(row_values(billed(number, book)))[1])
    dead.close()
    fuller = altered(billed(2, book), traceparent="00-1")
    traces.append(fuller)  # its process had come so far
    with Ledger(path, QUICK, follower=TraceFollower(traces)) as ledger:
        ledger.register(book)
        rows = {row.request_id: row for row in ledger.rows()}
    assert {name: row.outcome for name, row in rows.items()} == {
        "req-0": "ok", "req-1": "died", "req-2": "ok", "req-3": "died",
    }  # fmt: skip
    found = {record.request_id: record for record in traces.records()}
    assert {name: row_of(record) for name, record in found.items()} == rows
    assert found["req-2"] == fuller
    assert found["req-3"].outcome is Outcome.DIED
    assert [summary.failed for summary in traces.runs()] == [2]
    traces.check()
    traces.close()


class Watcher:
    """A follower that notes which journal files are there when it is asked to catch up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.there = folder, list[int]()

    def recovered(self, rows: Sequence[LedgerRow]) -> None:
        raise AssertionError(rows)

    def catch_up(self) -> None:
        self.there.append(len(list(self.folder.iterdir())))


def test_no_journal_goes_before_the_follower_has_caught_up(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path / "ledger.sqlite3.journal")
    with Ledger(tmp_path / "ledger.sqlite3", QUICK, follower=watcher) as ledger:
        for record in many(3):  # each fills a file
            ledger.append(record)
            assert ledger.flush()
    assert watcher.there
    assert all(count > 1 for count in watcher.there[:-1])
    assert list(watcher.folder.iterdir()) == []


def test_what_the_export_of_spans_drops_is_a_metric(tmp_path: Path) -> None:
    gate = threading.Event()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            gate.wait()
            return super().export(spans)

    traces = TraceStore(tmp_path / "traces.sqlite3")
    spans = SpanExport(Stuck(), SpanExportOptions(queue_records=4, queue_spans=8, batch_spans=1, delay_s=0.001))
    for number in range(40):
        spans.export(plain_record(f"r{number}"))
    with Ledger(tmp_path / "ledger.sqlite3") as ledger:
        told = metrics(StoreCollector(ledger, traces, spans))
    assert told["keepwarm_span_dropped_records_total"] == spans.dropped > 0
    gate.set()
    assert spans.close(30)
    traces.close()


def test_what_the_trace_store_drops_is_a_metric(tmp_path: Path) -> None:
    path = tmp_path / "traces.sqlite3"
    traces = TraceStore(path, TraceStoreOptions(queue_records=4, batch_records=1, max_age_ns=None))
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # the writer waits for this lock
    with Ledger(tmp_path / "ledger.sqlite3") as ledger:
        for record in many(20):
            ledger.append(record)
            traces.append(record)
        assert not traces.keep(many(20), 0.01)
        told = metrics(StoreCollector(ledger, traces))
        assert "keepwarm_span_dropped_records_total" not in told
        assert told["keepwarm_trace_dropped_records_total"] >= 14
        blocker.execute("ROLLBACK")
        blocker.close()
        assert traces.keep(many(20), 30)
        assert ledger.flush()
        told = metrics(StoreCollector(ledger, traces))
    assert (told["keepwarm_trace_waiting_records"], told["keepwarm_ledger_pending_rows"]) == (0, 0)
    assert (told["keepwarm_ledger_failing"], told["keepwarm_ledger_spilled_rows"]) == (0, 0)
    assert traces.count() == 20
    traces.close()


def test_a_ledger_that_cannot_be_read_shows_no_old_numbers(tmp_path: Path) -> None:
    away = postgres_database("postgresql://nobody@127.0.0.1:1/none", tmp_path)
    assert metrics(LedgerCollector(LedgerCounters(away))) == {"keepwarm_ledger_unreadable": 1}
