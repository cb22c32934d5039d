"""The gateway's state at the moment of a scrape, as Prometheus metrics. Their labels are the configured instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from billing.ledger import Ledger
from gateway.fleet import Fleet, Instance
from gateway.flights import Flights
from radix_index.base import Knowledge, PrefixIndex

_INSTANCE_GAUGES: dict[str, tuple[str, Callable[[Instance], float]]] = {
    "keepwarm_instance_up": ("1 while the instance takes requests", lambda i: float(i.takes_requests)),
    "keepwarm_instance_running": ("Requests that were routed there and are not over", lambda i: i.load.running),
    "keepwarm_instance_queued_tokens": (
        "Uncached prompt tokens that were routed there and have no first token yet",
        lambda i: i.load.queued_tokens,
    ),
    "keepwarm_instance_prefill_tokens_per_second": ("Learned prefill rate", lambda i: i.rates.prefill),
    "keepwarm_instance_events_degraded": (
        "1 while the instance publishes events and some are missing",
        lambda i: float(i.knowledge is Knowledge.STALE),
    ),
}


class StateCollector(Collector):
    """Reads the state when asked; nothing is counted twice."""

    def __init__(self, fleet: Fleet, flights: Flights, index: PrefixIndex, ledger: Ledger) -> None:
        self._fleet, self._flights, self._index, self._ledger = fleet, flights, index, ledger

    def register(self, registry: CollectorRegistry) -> None:
        """Take part in the registry's scrapes."""
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        yield GaugeMetricFamily("keepwarm_in_flight", "Requests in flight", value=self._flights.count)
        for name, (text, value) in _INSTANCE_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=("instance",))
            for instance in self._fleet.instances.values():
                family.add_metric((instance.id,), value(instance))
            yield family
        stats = self._index.stats()
        yield GaugeMetricFamily("keepwarm_index_blocks", "Blocks that the index knows", value=stats.blocks)
        yield GaugeMetricFamily("keepwarm_index_used_bytes", "Bytes of the index", value=stats.used_bytes)
        status = self._ledger.status()
        yield GaugeMetricFamily("keepwarm_ledger_pending_rows", "Rows not yet committed", value=status.pending)
        failing = float(status.failing_since_ns is not None)
        yield GaugeMetricFamily("keepwarm_ledger_failing", "1 while the ledger cannot be written", value=failing)
