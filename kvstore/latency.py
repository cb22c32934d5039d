"""How long calls took, as a histogram that costs a bisection a call."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_NS = 1e-9


@dataclass(slots=True)
class LatencyHistogram:
    """``counts[i]`` calls took at most ``BUCKETS_S[i]``, the last ones longer than any."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_ns: int = 0

    def observe(self, took_ns: int) -> None:
        """Count one call."""
        self.counts[bisect_left(BUCKETS_S, took_ns * _NS)] += 1
        self.sum_ns += took_ns

    def copy(self) -> LatencyHistogram:
        """Return a snapshot."""
        return LatencyHistogram(list(self.counts), self.sum_ns)
