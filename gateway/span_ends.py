"""Ends of runs that agents' own spans tell of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.run_ends import RunEnds, Why, run_name
from tracing.received import ReceivedSpan
from tracing.runs import RunLinker


class SpanEnds:
    """Reads spans as they come in."""

    def __init__(self, ends: RunEnds, linker: RunLinker, *, by_root: bool) -> None:
        """``by_root``: a trace's root span ends its runs: true of agents that make one trace of all that they do."""
        self._ends, self._linker, self._by_root = ends, linker, by_root

    def received(self, key_id: str, spans: Sequence[ReceivedSpan]) -> None:
        """End the runs that these spans of one key say have ended."""
        for span in spans:
            if span.ends_run or (self._by_root and span.parent_id is None):
                for run_id in self._runs_of(key_id, span):
                    self._ends.end(run_name(key_id, run_id), Why.SPAN)

    def _runs_of(self, key_id: str, span: ReceivedSpan) -> Iterable[str]:
        return [span.run_id] if span.run_id is not None else self._linker.of_trace(key_id, span.trace_id)
