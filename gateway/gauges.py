"""The gateway's state at the moment of a scrape, as Prometheus metrics. Their labels are the configured instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.breaker import State
from gateway.feeds import Feed
from gateway.fleet import Fleet
from gateway.flights import Flights
from gateway.instance import Instance
from gateway.snapshots import SnapshotStats
from radix_index.base import Knowledge, PrefixIndex
from radix_index.predict import PredictionStats

_INSTANCE_GAUGES: dict[str, tuple[str, Callable[[Instance], float]]] = {
    "keepwarm_instance_up": ("1 while the instance takes requests", lambda i: float(i.takes_requests)),
    "keepwarm_instance_breaker_open": (
        "1 while requests that failed there keep new ones away",
        lambda i: float(i.breaker.state is not State.CLOSED),
    ),
    "keepwarm_instance_running": ("Requests that were routed there and are not over", lambda i: i.load.running),
    "keepwarm_instance_queued_tokens": (
        "Uncached prompt tokens that were routed there and have no first token yet",
        lambda i: i.load.queued_tokens,
    ),
    "keepwarm_instance_prefill_tokens_per_second": ("Learned prefill rate", lambda i: i.rates.prefill),
    "keepwarm_instance_events_degraded": (
        "1 while the instance publishes events and some of what it holds is not known from them",
        lambda i: float(i.knowledge in (Knowledge.STALE, Knowledge.PARTIAL)),
    ),
}

_FEED_GAUGES: dict[str, tuple[str, Callable[[Feed], float]]] = {
    "keepwarm_instance_events_waiting_blocks": (
        "Blocks that the instance announced behind a block that is not known, so that nobody can name them yet",
        lambda feed: feed.waiting_blocks,
    ),
}

_PREDICTION_GAUGES: dict[str, tuple[str, Callable[[PredictionStats], float]]] = {
    "keepwarm_prediction_answers": ("Answers whose cached tokens were predicted", lambda s: s.answers),
    "keepwarm_prediction_error_tokens_mean": (
        "Mean of predicted less reported cached tokens",
        lambda s: s.mean_error_tokens,
    ),
    "keepwarm_prediction_absolute_error_tokens_mean": (
        "Mean size of the difference between predicted and reported cached tokens",
        lambda s: s.mean_absolute_error_tokens,
    ),
    "keepwarm_prediction_exact_share": ("Share of answers that were predicted to the block", lambda s: s.exact_share),
}

_SNAPSHOT_COUNTERS: dict[str, tuple[str, Callable[[SnapshotStats], float]]] = {
    "keepwarm_index_snapshots_written": ("Snapshots of the index that were written", lambda s: s.written),
    "keepwarm_index_snapshots_void": ("Snapshots given up since a source was forgotten meanwhile", lambda s: s.void),
    "keepwarm_index_snapshots_failed": ("Snapshots that could not be written", lambda s: s.failed),
    "keepwarm_index_snapshots_ignored": ("Files that were no whole snapshot of this version", lambda s: s.ignored),
}


class StateCollector(Collector):
    """Reads the state when asked; nothing is counted twice."""

    def __init__(self, fleet: Fleet, flights: Flights, index: PrefixIndex, snapshots: SnapshotStats) -> None:
        self._fleet, self._flights, self._index = fleet, flights, index
        self._snapshots = snapshots

    def register(self, registry: CollectorRegistry) -> None:
        """Take part in the registry's scrapes."""
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield them."""
        yield GaugeMetricFamily("keepwarm_in_flight", "Requests in flight", value=self._flights.count)
        for name, (text, value) in _INSTANCE_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=("instance",))
            for instance in self._fleet.instances.values():
                family.add_metric((instance.id,), value(instance))
            yield family
        feeds = [(i.id, i.feed) for i in self._fleet.instances.values() if i.feed is not None]
        for name, (text, told) in _FEED_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=("instance",))
            for instance_id, feed in feeds:
                family.add_metric((instance_id,), told(feed))
            yield family
        faults = CounterMetricFamily(
            "keepwarm_instance_event_faults",
            "Faults in the instance's events, and events that say nothing that can be indexed, since it is followed",
            labels=("instance", "kind"),
        )
        for instance_id, feed in feeds:
            for kind, count in feed.faults().items():
                faults.add_metric((instance_id, kind), count)
        yield faults
        for name, (text, score) in _PREDICTION_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=("instance", "basis"))
            for instance in self._fleet.instances.values():
                for basis, scored in instance.scores.items():
                    if scored.answers:
                        family.add_metric((instance.id, basis), score(scored))
            yield family
        stats = self._index.stats()
        yield GaugeMetricFamily("keepwarm_index_blocks", "Blocks that the index knows", value=stats.blocks)
        yield GaugeMetricFamily("keepwarm_index_used_bytes", "Bytes of the index", value=stats.used_bytes)
        for name, (text, counted) in _SNAPSHOT_COUNTERS.items():
            yield CounterMetricFamily(name, text, value=counted(self._snapshots))
        yield GaugeMetricFamily("keepwarm_index_snapshot_bytes", "Bytes of the last one", value=self._snapshots.bytes)
