"""How the ledger, the trace store and the export of spans fare, for alarms: what waits, and what could not be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from billing.ledger import Ledger, LedgerStatus
from tracing.export import SpanExport
from tracing.store import TraceStore

_LEDGER_GAUGES: dict[str, tuple[str, Callable[[LedgerStatus], float]]] = {
    "keepwarm_ledger_pending_rows": ("Rows not yet committed", lambda s: s.pending),
    "keepwarm_ledger_spilled_rows": ("Of those, rows that wait in the journal alone", lambda s: s.spilled),
    "keepwarm_ledger_spilled_bytes": ("Bytes of journal that wait", lambda s: s.spilled_bytes),
    "keepwarm_ledger_failing": ("1 while the ledger cannot be written", lambda s: s.failing_since_ns is not None),
}
_LEDGER_COUNTERS: dict[str, tuple[str, Callable[[LedgerStatus], float]]] = {
    "keepwarm_ledger_write_failures": ("Attempts at a group commit that failed", lambda s: s.write_failures),
    "keepwarm_ledger_journal_failures": ("Rows accepted without a journal record", lambda s: s.journal_failures),
    "keepwarm_ledger_lost_rows": ("Rows that waited in a journal file which was damaged", lambda s: s.lost),
    "keepwarm_ledger_conflicts": ("Second, different rows of a request", lambda s: s.conflicts),
    "keepwarm_ledger_refused_rows": ("Rows that the table cannot hold", lambda s: s.refused),
    "keepwarm_ledger_duplicates": ("Rows that were there already", lambda s: s.duplicates),
    "keepwarm_ledger_recovered_rows": ("Rows imported from dead processes", lambda s: s.recovered),
    "keepwarm_ledger_died_requests": ("Requests that died with their process", lambda s: s.died_in_flight),
}


class StoreCollector(Collector):
    """Reads their states when asked."""

    def __init__(self, ledger: Ledger, traces: TraceStore, spans: SpanExport | None = None) -> None:
        self._ledger, self._traces, self._spans = ledger, traces, spans

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        status = self._ledger.status()
        for name, (text, value) in _LEDGER_GAUGES.items():
            yield GaugeMetricFamily(name, text, value=float(value(status)))
        for name, (text, value) in _LEDGER_COUNTERS.items():
            yield CounterMetricFamily(name, text, value=value(status))
        traces = self._traces.stats()
        yield CounterMetricFamily("keepwarm_trace_records", "Records handed to the trace store", value=traces.appended)
        text = "Records that the trace store did not keep: its queue was full, or it cannot be written"
        yield CounterMetricFamily("keepwarm_trace_dropped_records", text, value=traces.dropped)
        yield GaugeMetricFamily("keepwarm_trace_waiting_records", "Records not yet committed", value=traces.waiting)
        failing = float(self._traces.failure is not None)
        yield GaugeMetricFamily("keepwarm_trace_failing", "1 while the trace store cannot be written", value=failing)
        if self._spans is not None:
            text = "Records whose spans were not exported: the backend is slower than the requests"
            yield CounterMetricFamily("keepwarm_span_dropped_records", text, value=self._spans.dropped)
