"""What the limits did, for Prometheus: by result only, since whose limits they were is for the ledger to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from gateway.limits.limiter import LimitStatus

_RESULTS: dict[str, Callable[[LimitStatus], int]] = {
    "admitted": lambda status: status.admitted,
    "denied": lambda status: status.denied,
    "denied_in_outage": lambda status: status.denied_by_outage,
    "admitted_in_outage": lambda status: status.admitted_in_outage,
}


class LimitCollector(Collector):
    """Reads the counters when asked."""

    def __init__(self, status: LimitStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield them."""
        family = CounterMetricFamily(
            "keepwarm_limited_requests", "Requests of callers with limits, by what the limits said", labels=["result"]
        )
        for result, count in _RESULTS.items():
            family.add_metric([result], count(self._status))
        yield family
