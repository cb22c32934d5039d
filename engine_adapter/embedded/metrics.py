"""Prometheus metrics of one embedded engine, under SGLang's names where SGLang has one.

What has no counterpart there (pages by tier) carries the prefix ``keepwarm_engine_``. The registry is the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_adapter.embedded.answers import Outcome
from engine_adapter.embedded.request import EngineLoad
from kvstore.latency import BUCKETS_S
from kvstore.page import Tier
from kvstore.tiers.base import TierStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_NS = 1e-9


class EngineMetrics:
    """Counts what passes; reads the engine's load and the tiers' counters when it is asked."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.registry = CollectorRegistry()
        names = list(self._labels)
        self._ttft = Histogram(
            "sglang:time_to_first_token_seconds",
            "Arrival to first token.",
            names,
            registry=self.registry,
            buckets=_TTFT_BUCKETS_S,
        ).labels(**self._labels)
        self._gap = Histogram(
            "sglang:inter_token_latency_seconds",
            "Gaps between the tokens of an answer.",
            names,
            registry=self.registry,
            buckets=_ITL_BUCKETS_S,
        ).labels(**self._labels)
        self._whole = Histogram(
            "sglang:e2e_request_latency_seconds",
            "Arrival to end.",
            names,
            registry=self.registry,
            buckets=_TTFT_BUCKETS_S,
        ).labels(**self._labels)
        self._cached = Counter(
            "sglang:cached_tokens",
            "Prompt tokens served from each tier.",
            [*names, "cache_source"],
            registry=self.registry,
        )

    def token(self, waited_ns: int, *, first: bool) -> None:
        """Count a token that came ``waited_ns`` after the one before it, or after the request's arrival."""
        (self._ttft if first else self._gap).observe(waited_ns * _NS)

    def finished(self, outcome: Outcome, lasted_ns: int) -> None:
        """Count an answer that came to its end."""
        self._whole.observe(lasted_ns * _NS)
        for tier, tokens in zip(Tier, outcome.hit_tokens, strict=True):
            self._cached.labels(**self._labels, cache_source=tier.label).inc(tokens)

    def observe_engine(self, load: Callable[[], EngineLoad], tiers: Callable[[], Mapping[Tier, TierStats]]) -> None:
        """From now on show also what these return at the moment of a scrape."""
        self.registry.register(_EngineCollector(load, tiers, self._labels))

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Gauges and counters that live in the engine and the store."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        tiers: Callable[[], Mapping[Tier, TierStats]],
        labels: Mapping[str, str],
    ) -> None:
        self._load, self._tiers, self._labels = load, tiers, labels

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not read the engine."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return one snapshot."""
        load = self._load()
        gauges = {
            "num_running_reqs": (load.running, "Requests in the batch."),
            "num_queue_reqs": (load.waiting, "Requests that wait."),
            "num_used_tokens": (load.used_tokens, "Token slots of device pages in use by requests."),
            "max_total_num_tokens": (load.total_tokens, "Token slots of the device tier."),
            "token_usage": (load.used_tokens / max(1, load.total_tokens), "Share of token slots in use."),
            "num_waiting_uncached_tokens": (load.waiting_uncached_tokens, "Prompt tokens still to be computed."),
        }
        for name, (value, text) in gauges.items():
            yield self._one(GaugeMetricFamily(f"sglang:{name}", text, labels=list(self._labels)), value)
        counters = {
            "prompt_tokens": (load.prompt_tokens, "Prompt tokens of admitted requests."),
            "generation_tokens": (load.generated_tokens, "Output tokens."),
            "num_requests": (load.requests, "Requests accepted."),
            "num_retracted_reqs": (load.preemptions, "Requests set back for want of pages."),
        }
        for name, (value, text) in counters.items():
            yield self._one(CounterMetricFamily(f"sglang:{name}", text, labels=list(self._labels)), value)
        yield from self._tier_metrics()

    def _one(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family

    def _tier_metrics(self) -> Iterable[Metric]:
        labels = [*self._labels, "tier"]
        used = GaugeMetricFamily("keepwarm_engine_tier_used_bytes", "Bytes of pages held.", labels=labels)
        events = CounterMetricFamily(
            "keepwarm_engine_tier_pages", "Pages by what happened to them.", labels=[*labels, "event"]
        )
        moved = CounterMetricFamily(
            "keepwarm_engine_tier_bytes", "Bytes of pages read and written.", labels=[*labels, "direction"]
        )
        seconds = HistogramMetricFamily(
            "keepwarm_engine_tier_seconds", "How long calls of a tier took.", labels=[*labels, "operation"]
        )
        for tier, stats in self._tiers().items():
            own = [*self._labels.values(), tier.label]
            used.add_metric(own, stats.used_bytes)
            moved.add_metric([*own, "read"], stats.read_bytes)
            moved.add_metric([*own, "written"], stats.written_bytes)
            for operation, histogram in (("get", stats.get_latency), ("put", stats.put_latency)):
                bounds = [*map(str, BUCKETS_S), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
                seconds.add_metric([*own, operation], buckets, histogram.sum_ns * _NS)
            for name in ("hits", "puts", "evictions", "dropped"):
                events.add_metric([*own, name], getattr(stats, name))
            for kind, reasons in (("miss", stats.misses), ("alarm", stats.alarms)):
                for reason, count in reasons.items():
                    events.add_metric([*own, f"{kind}:{reason}"], count)
        yield used
        yield moved
        yield events
        yield seconds
