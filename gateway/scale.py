"""How many instances each model could do with: what an autoscaler reads, by Prometheus. See ``docs/autoscaling.md``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.admission_gate import AdmissionGate
from gateway.fleet import Fleet
from gateway.instance import Instance

_BUSY_TARGET = 0.6
"""Where prompts are computed in more of the time than that, those that come at random wait longer than they take."""

_BACKLOG_TARGET_S = 2.0
_MEMORY_TARGET = 0.85
_AT_MOST_TIMES = 4.0


@dataclass(frozen=True, slots=True)
class Need:
    """What binds at the instances of one model, as means over them. ``memory_share``: of their devices, held by what
    runs; ``None`` where the size is unknown. ``queue_s``: how long the oldest request waits for its turn."""

    instances: int
    busy_share: float
    backlog_s: float
    memory_share: float | None
    queue_s: float = 0.0

    def replicas(self) -> int:
        """Return how many instances would bring what binds most down to its target; 1 where nothing runs."""
        if not self.instances:
            return 1
        load = max(
            self.busy_share / _BUSY_TARGET,
            self.backlog_s / _BACKLOG_TARGET_S,
            (self.memory_share or 0.0) / _MEMORY_TARGET,
            self.queue_s / _BACKLOG_TARGET_S if self.queue_s > _BACKLOG_TARGET_S else 0.0,
        )
        return max(math.ceil(self.instances * min(load, _AT_MOST_TIMES) - 1e-9), 1)


def need_of(instances: Sequence[Instance], now_s: float, queue_s: float = 0.0) -> Need:
    """Return what binds at these instances now."""
    able = [instance for instance in instances if instance.takes_requests]
    if not able:
        return Need(0, 0.0, 0.0, None, queue_s)
    loads = [instance.load for instance in able]
    sizes = [each.spec.capacity_tokens or (each.facts.capacity_tokens if each.facts else None) for each in able]
    memory = None
    if all(sizes):
        memory = sum(load.held_tokens for load in loads) / sum(size or 0 for size in sizes)
    busy = sum(load.busy_at(now_s) for load in loads) / len(able)
    return Need(len(able), busy, sum(load.backlog_s(now_s) for load in loads) / len(able), memory, queue_s)


class ScaleCollector(Collector):
    """Reads what binds when asked."""

    def __init__(
        self, fleet: Fleet, gate: AdmissionGate | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet, self._gate, self._now = fleet, gate, now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics, by model."""
        label = ("model",)
        queue_s = GaugeMetricFamily("keepwarm_queue_seconds", "Wait of the oldest request for its turn", labels=label)
        waiting = GaugeMetricFamily("keepwarm_queue_requests", "Requests that wait for their turn", labels=label)
        backlog = GaugeMetricFamily(
            "keepwarm_prefill_backlog_seconds", "Prompts queued at the engines, mean over instances", labels=label
        )
        busy = GaugeMetricFamily(
            "keepwarm_prefill_busy_share", "Share of the last minute in which prompts were computed", labels=label
        )
        replicas = GaugeMetricFamily(
            "keepwarm_recommended_replicas", "Instances that would bring what binds to its target", labels=label
        )
        now_s, queues = self._now(), {} if self._gate is None else {name: more for name, *more in self._gate.depths()}
        for model in self._fleet.models():
            depth, oldest_s, _ = queues.get(model, (0, 0.0, 0.0))
            need = need_of(self._fleet.serving(model), now_s, oldest_s)
            queue_s.add_metric((model,), oldest_s)
            waiting.add_metric((model,), depth)
            backlog.add_metric((model,), need.backlog_s)
            busy.add_metric((model,), need.busy_share)
            replicas.add_metric((model,), need.replicas())
        yield from (queue_s, waiting, backlog, busy, replicas)
