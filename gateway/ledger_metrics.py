"""The ledger's sums for Prometheus: what has been billed, from the first row on, whichever process wrote it.

Unlike ``tracing.metrics``, which counts what this process saw since it started, these are the ledger's: they equal
``keepwarm report`` whenever they are read. Gateways that share a ledger show the same numbers: take their maximum. A
sample is a double: exact up to 2**53 nano-units.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from billing.counters import LedgerCounters
from billing.errors import LedgerError

_log = logging.getLogger(__name__)
_LABELS = ["model", "outcome", "currency"]
_TOKEN_CLASSES = (
    ("fresh", "fresh_tokens"),
    ("hit_device", "hit_device_tokens"),
    ("hit_host", "hit_host_tokens"),
    ("hit_disk", "hit_disk_tokens"),
    ("hit_pool", "hit_pool_tokens"),
    ("hit_unknown", "hit_unknown_tokens"),
    ("written", "write_tokens"),
    ("output", "output_tokens"),
)


class LedgerCollector(Collector):
    """Reads the counters when asked."""

    def __init__(self, counters: LedgerCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yield the counters; corrections may lower money and tokens, so those are gauges.

        While the ledger cannot be read there are none: no number is better than an old one.
        """
        try:
            found = sorted(self._counters.refresh().items())
        except LedgerError as error:
            _log.error("the ledger's sums cannot be read: %s", error)
            found = None
        yield GaugeMetricFamily(
            "keepwarm_ledger_unreadable", "1 while the ledger cannot be read", value=float(found is None)
        )
        if found is None:
            return
        requests = CounterMetricFamily("keepwarm_ledger_requests", "Requests in the ledger", labels=_LABELS)
        unpriced = GaugeMetricFamily(
            "keepwarm_ledger_unpriced_requests", "Requests in the ledger that have no price yet", labels=_LABELS
        )
        cost = GaugeMetricFamily("keepwarm_ledger_cost_nano", "What the ledger's rows come to", labels=_LABELS)
        saved = GaugeMetricFamily("keepwarm_ledger_saved_nano", "What they saved", labels=_LABELS)
        tokens = GaugeMetricFamily("keepwarm_ledger_tokens", "Tokens in the ledger", labels=[*_LABELS, "token_class"])
        for ((model, outcome), currency), sums in found:
            labels = [model or "none", outcome, currency]
            requests.add_metric(labels, sums.requests)
            unpriced.add_metric(labels, sums.unpriced)
            cost.add_metric(labels, sums.amount_nano)
            saved.add_metric(labels, sums.saved_nano)
            for name, field in _TOKEN_CLASSES:
                tokens.add_metric([*labels, name], getattr(sums, field))
        yield from (requests, unpriced, cost, saved, tokens)

    def describe(self) -> Iterator[Metric]:
        """Say nothing beforehand: registering must not read the ledger."""
        yield from ()
