"""What the console reads: handed in by whoever mounts it, each with a default that shows nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from billing.ledger_read import RowFilter
from billing.prices import PriceBook
from billing.reports import Report, build_report
from gateway.console.costs import ReportOf
from gateway.console.key_desk import KeyDesk
from gateway.console.live import LiveOptions
from gateway.console.visitor import EVERYBODY, Visitor
from gateway.flights import Underway
from gateway.instance import Instance
from radix_index.index import RadixIndex
from tracing.store import TraceStore


def _no_report(by: Sequence[str], _where: RowFilter) -> Report:
    return build_report((), by)


async def _no_metrics(_instance: Instance) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Sources:
    """``visitor_of`` is asked on every request and decides whose data it may see. ``report_of`` (the ledger's report),
    ``books`` (its price versions) and the store are read in threads; everything else is of this moment.

    ``metrics_of``: an engine's own metrics as text, ``None`` where it tells none. ``settings`` (and what they would be
    if nobody had set any) are as they dump themselves; the console hides what is secret in them.
    """

    traces: TraceStore
    visitor_of: Callable[[web.Request], Visitor] = lambda _request: EVERYBODY
    clock: Callable[[], int] = time.time_ns
    report_of: ReportOf = _no_report
    books: Callable[[], Mapping[str, PriceBook]] = dict
    instances: Callable[[], Sequence[Instance]] = tuple
    index: RadixIndex | None = None
    underway: Callable[[], Sequence[Underway]] = tuple
    is_leaving: Callable[[], bool] = lambda: False
    metrics_of: Callable[[Instance], Awaitable[str | None]] = _no_metrics
    settings: Mapping[str, object] = field(default_factory=dict)
    default_settings: Mapping[str, object] = field(default_factory=dict)
    keys: KeyDesk | None = None
    live: LiveOptions = field(default_factory=LiveOptions)
