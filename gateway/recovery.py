"""What keeps the trace store in agreement with the ledger whatever dies: a request that has a bill has a trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from billing.row import LedgerRow, record_of
from tracing.errors import TracingError
from tracing.store import TraceStore

_log = logging.getLogger(__name__)
_PATIENCE_S = 30.0


class TraceFollower:
    """The ledger's follower. A trace store that fails is told, and holds no bill up for longer than some seconds."""

    def __init__(self, traces: TraceStore) -> None:
        self._traces = traces

    def recovered(self, rows: Sequence[LedgerRow]) -> None:
        """Keep a record of each, made from its row; one that the dead process had stored is fuller, and stays."""
        try:
            kept = self._traces.keep([record_of(row) for row in rows], _PATIENCE_S)
        except TracingError as error:
            _log.error("traces of %d requests of a dead process are not all kept: %s", len(rows), error)
            return
        if not kept:
            _log.error("traces of %d requests of a dead process are not all kept", len(rows))

    def catch_up(self) -> None:
        """Wait until what was appended is committed."""
        if not self._traces.flush(_PATIENCE_S):
            _log.error("the trace store does not keep up: what it has not stored is lost if this process dies")
