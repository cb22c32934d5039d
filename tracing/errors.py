"""What tracing can raise.

::

    TracingError
    ├── TraceStoreError            the store can't be opened, read or written
    │   ├── TraceStoreUnavailable  its server can't be reached now
    │   └── AmbiguousRunError      several tenants have a run of that name, and none was named
    ├── UnstorableRecord           a record holds what JSON can't: a lone surrogate, an integer of 65 bits
    └── ExportUnavailable          spans are to be exported and what that needs isn't installed
"""

from __future__ import annotations

from collections.abc import Sequence


class TracingError(Exception):
    """Any failure of tracing."""


class TraceStoreError(TracingError):
    """The trace store can't be opened, read or written."""


class TraceStoreUnavailable(TraceStoreError):
    """The trace store's server can't be reached now; later it may."""


class AmbiguousRunError(TraceStoreError):
    """Several tenants have a run of the same (client-given) name, and the caller named none of them."""

    def __init__(self, run_id: str, tenants: Sequence[str]) -> None:
        super().__init__(f"run {run_id!r} exists for several tenants ({', '.join(sorted(tenants))}): name one")
        self.run_id = run_id
        self.tenants = tuple(sorted(tenants))


class UnstorableRecord(TracingError):
    """A record holds something that has no JSON form."""


class ExportUnavailable(TracingError):
    """Spans are to be exported and what that needs isn't installed."""
