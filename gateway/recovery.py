"""What the trace store is told of requests whose process died: their ledger rows say what was billed for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from billing.row import LedgerRow, record_of
from tracing.errors import TracingError
from tracing.store import TraceStore

_log = logging.getLogger(__name__)
_KEEP_S = 60.0


def into_traces(traces: TraceStore) -> Callable[[Sequence[LedgerRow]], None]:
    """Return what a ledger tells its recovered rows to: each request then has a trace that agrees with its bill.

    A record that the dead process had stored is the fuller one, and stays.
    """

    def keep(rows: Sequence[LedgerRow]) -> None:
        try:
            if not traces.keep([record_of(row) for row in rows], _KEEP_S):
                _log.error("traces of %d requests of a dead process are not all kept", len(rows))
        except TracingError as error:
            _log.error("traces of %d requests of a dead process are not all kept: %s", len(rows), error)

    return keep
