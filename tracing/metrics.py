"""Prometheus metrics as a function of the records: nothing else counts, so metrics and bill can't disagree.

Every label has a bounded set of values. A model's name is a label only when an instance answered under it (what clients
type is not), and beyond a limit further names are counted as ``other``. Money is counted in nano-units; a Prometheus
sample is a double and so exact up to 2**53 nano-units (nine million units of currency) in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tracing.record import RequestRecord, UsageSource

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_OTHER: Final = "other"
_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DURATION_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Bounds of the label sets."""

    max_models: int = 64
    max_instances: int = 256


class Metrics:
    """The gateway's metrics in a registry of their own; others may register gauges of theirs in ``registry``."""

    def __init__(self, options: MetricsOptions | None = None) -> None:
        options = options or MetricsOptions()
        self.registry = registry = CollectorRegistry()
        self._models = _Bounded(options.max_models)
        self._instances = _Bounded(options.max_instances)
        self._known: dict[tuple[object, tuple[str, ...]], Any] = {}
        self._requests = Counter(
            "keepwarm_requests", "Requests by how they ended", ("endpoint", "model", "outcome"), registry=registry
        )
        self._tokens = Counter(
            "keepwarm_tokens",
            "Tokens by disjoint class; hit ratio = sum of hit_* over all classes but output",
            ("model", "token_class"),
            registry=registry,
        )
        self._predicted = Counter(
            "keepwarm_predicted_hit_tokens",
            "Prompt tokens that routing expected to hit, of requests whose engine counted them",
            ("model",),
            registry=registry,
        )
        self._cost = Counter("keepwarm_cost_nano", "Amounts billed", ("model", "currency"), registry=registry)
        self._saved = Gauge(
            "keepwarm_saved_nano",
            "Amounts that cache hits saved, since the start; a gauge because a price book may make a hit dearer",
            ("model", "currency"),
            registry=registry,
        )
        self._unpriced = Counter(
            "keepwarm_unpriced_requests", "Requests without a price", ("model",), registry=registry
        )
        self._ttft = Histogram(
            "keepwarm_ttft_seconds",
            "Arrival to first token",
            ("model", "hit"),
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._duration = Histogram(
            "keepwarm_request_seconds", "Arrival to end", ("model",), buckets=_DURATION_BUCKETS_S, registry=registry
        )
        self._attempts = Counter(
            "keepwarm_attempts", "Tries at an instance", ("instance", "result"), registry=registry
        )  # fmt: skip
        self._problems = Counter(
            "keepwarm_usage_problems",
            "Contradictions in what engines said of their usage",
            ("model",),
            registry=registry,
        )
        self._echoes = Counter(
            "keepwarm_quoted_answers",
            "Requests by what became of the newest answer that they quote",
            ("model", "echo"),
            registry=registry,
        )
        self._echo_won = Counter(
            "keepwarm_echo_won_tokens",
            "Hit tokens that would have missed, had quoted answers been rendered anew",
            ("model",),
            registry=registry,
        )
        self._special_tokens = Counter(
            "keepwarm_special_tokens",
            "Requests with text that spells a special token, by what was done about it",
            ("model", "handling"),
            registry=registry,
        )
        self._repairs = Counter(
            "keepwarm_prefix_repairs", "Requests that a policy changed", ("model", "policy"), registry=registry
        )
        self._repair_won = Gauge(
            "keepwarm_repair_won_tokens",
            "Hit tokens of repaired requests beyond those they would have had as they came; a gauge, since some lose",
            ("model",),
            registry=registry,
        )

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request."""
        answered = record.attempts and record.attempts[-1].status == 200
        model = self._models.label(record.served_model) if answered and record.served_model else "none"
        self._series(self._requests, record.endpoint, model, record.outcome.value).inc()
        self._observe_tokens(record, model)
        self._observe_money(record, model)
        stamps = record.stamps
        if stamps.ttft_ns is not None:
            hit = "true" if record.usage.hit_tokens else "false"
            self._series(self._ttft, model, hit).observe(stamps.ttft_ns / 1e9)
        if stamps.closed_ns:
            self._series(self._duration, model).observe((stamps.closed_ns - stamps.arrived_ns) / 1e9)
        for attempt in record.attempts:
            result = "none" if attempt.status is None else f"{attempt.status // 100}xx"
            self._series(self._attempts, self._instances.label(attempt.instance), result).inc()
        if (note := record.prompt) is not None:
            self._series(self._echoes, model, note.echo).inc()
            self._series(self._echo_won, model).inc(note.echo_won_tokens)
            if note.special_tokens is not None:
                self._series(self._special_tokens, model, note.special_tokens).inc()
            for policy in note.repairs:
                self._series(self._repairs, model, policy).inc()
            if note.repair_won_tokens:
                self._series(self._repair_won, model).inc(note.repair_won_tokens)
        if record.usage_problems:
            self._series(self._problems, model).inc(len(record.usage_problems))

    def _series(self, metric: _Metric, *labels: str) -> _Metric:
        """Return the series of these labels; to have the library find it costs several times what it then does."""
        series = self._known.get((metric, labels))
        if series is None:
            series = self._known[metric, labels] = metric.labels(*labels)
        return series

    def render(self) -> bytes:
        """The metrics in Prometheus' text format (:data:`CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def _observe_tokens(self, record: RequestRecord, model: str) -> None:
        usage = record.usage
        for token_class, count in (
            ("fresh", usage.fresh_tokens),
            ("written", usage.written_tokens),
            ("hit_device", usage.hit_device_tokens),
            ("hit_host", usage.hit_host_tokens),
            ("hit_disk", usage.hit_disk_tokens),
            ("hit_pool", usage.hit_pool_tokens),
            ("hit_unknown", usage.hit_unknown_tokens),
            ("output", usage.output_tokens),
        ):
            series = self._series(self._tokens, model, token_class)
            if count:
                series.inc(count)
        if record.decision is not None and usage.source is UsageSource.ENGINE:
            self._series(self._predicted, model).inc(record.decision.predicted_hit_tokens)

    def _observe_money(self, record: RequestRecord, model: str) -> None:
        charge = record.charge
        if charge.amount_nano is None:
            self._series(self._unpriced, model).inc()
            return
        self._series(self._cost, model, charge.currency).inc(charge.amount_nano)
        self._series(self._saved, model, charge.currency).inc(charge.saved_nano or 0)


class _Bounded:
    """The first ``limit`` distinct values as they are, all later ones as one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: set[str] = set()

    def label(self, value: str) -> str:
        if value in self._values:
            return value
        if len(self._values) >= self._limit:
            return _OTHER
        self._values.add(value)
        return value
