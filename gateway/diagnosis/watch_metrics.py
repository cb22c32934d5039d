"""How the watch fares: steps compared, steps whose former request was gone, steps dropped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.diagnosis.watch import PromptWatch


class WatchCollector(Collector):
    """Reads the watch's counters when asked."""

    def __init__(self, watch: PromptWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        stats = self._watch.stats
        yield CounterMetricFamily("keepwarm_compared_steps", "Steps held against the one before", value=stats.compared)
        text = "Steps whose former request was not at hand any more"
        yield CounterMetricFamily("keepwarm_unseen_steps", text, value=stats.unseen)
        text = "Steps that were not compared since the queue was full"
        yield CounterMetricFamily("keepwarm_uncompared_steps", text, value=stats.dropped)
