"""What one run comes to: plain values that a table, a JSON file and a picture are made of.

The first ``WARM_UP`` share of requests fills the caches and is left out of everything but the load balance. All times
are simulated, except those under ``measured``, which are this machine's and differ from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.replay.engine_model import Flight
from gateway.replay.performance import EnginePerformance
from gateway.replay.pricing import Cost
from gateway.replay.separation import Separation, separate
from gateway.replay.simulation import Replayed
from gateway.replay.workload import infinite_hits
from kvstore.page import Tier

WARM_UP = 0.1
CURVE_POINTS = 101


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must meet to count as good."""

    ttft_s: float = 4.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in a few numbers."""

    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class TierBalance:
    """Fetching against recomputing for one lower tier. ``recompute_s``: what computing the fetched tokens had cost."""

    hit_tokens: int
    fetch_s: float
    recompute_s: float
    declined_tokens: int  # held there, and recomputed because that was faster
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """The hits that the router counted on against those that came, over the counted requests."""

    mean_error_tokens: float
    exact_share: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Of this machine, not simulated."""

    decision_us: Spread
    wall_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy's run."""

    policy: str
    requests: int
    counted_requests: int
    refused_requests: int
    simulated_s: float
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    hit_share: float
    bound_hit_share: float  # of an infinite cache over the same requests in the same order
    tier_hit_shares: dict[str, float]
    wasted_fetch_tokens: int
    imbalance: float  # max / mean - 1 of the instances' prefill work
    prefill_s_by_instance: list[float]
    busy_share: float
    ttft_s: Spread
    tpot_s: Spread
    ttft_curve_s: list[float]  # its 0th to 100th percentile
    good_share: float
    goodput_per_s: float
    objectives: Objectives
    tiers: dict[str, TierBalance]
    separation: Separation
    prediction: Prediction
    index_blocks: int
    index_bytes: int
    index_evicted_blocks: int
    cost: Cost | None
    measured: Measured

    @property
    def of_bound(self) -> float:
        """The share of the infinite cache's hits that was reached."""
        return self.hit_share / self.bound_hit_share if self.bound_hit_share else 1.0


def counted(flights: Sequence[Flight]) -> list[Flight]:
    """Return the flights after the warm-up that were served."""
    return [flight for flight in flights[int(len(flights) * WARM_UP) :] if not flight.was_refused]


def summarize(replayed: Replayed, objectives: Objectives, cost: Cost | None, wall_s: float) -> Summary:
    """Compute a summary. Needs at least one counted request. O(requests)."""
    flights = counted(replayed.flights)
    performance = replayed.fleet.performance
    bounds = dict(
        zip(replayed.flights, infinite_hits(replayed.workload, [f.request for f in replayed.flights]), strict=True)
    )
    prompt_tokens = sum(flight.request.prompt_tokens for flight in flights)
    by_tier = [sum(flight.hit_tokens[tier] for flight in flights) for tier in Tier]
    work = [engine.spent.prefill for engine in replayed.engines]
    began_s, last_s = flights[0].arrived_s, flights[-1].arrived_s
    span_s = (last_s if last_s > began_s else replayed.ended_s) - began_s  # one request lasts as long as it takes
    ttfts = [flight.ttft_s for flight in flights]
    good = sum(_is_good(flight, objectives) for flight in flights)
    errors = [flight.predicted_hit_tokens - sum(flight.hit_tokens) for flight in flights]
    index = replayed.router.index.stats()
    return Summary(
        policy=replayed.router.options.policy,
        requests=len(replayed.flights),
        counted_requests=len(flights),
        refused_requests=sum(flight.was_refused for flight in replayed.flights),
        simulated_s=replayed.ended_s,
        requests_per_s=len(flights) / span_s,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(flight.request.output_tokens for flight in flights),
        hit_share=sum(by_tier) / prompt_tokens,
        bound_hit_share=sum(bounds[flight] for flight in flights) / prompt_tokens,
        tier_hit_shares={tier.name.lower(): by_tier[tier] / prompt_tokens for tier in Tier},
        wasted_fetch_tokens=sum(flight.wasted_tokens for flight in flights),
        imbalance=max(work) * len(work) / sum(work) - 1,
        prefill_s_by_instance=work,
        busy_share=sum(engine.spent.busy for engine in replayed.engines) / (len(work) * replayed.ended_s),
        ttft_s=_spread(ttfts),
        tpot_s=_spread([tpot for flight in flights if (tpot := flight.tpot_s) is not None]),
        ttft_curve_s=[float(value) for value in np.percentile(ttfts, np.linspace(0, 100, CURVE_POINTS))],
        good_share=good / len(flights),
        goodput_per_s=good / span_s,
        objectives=objectives,
        tiers=_balances(flights, replayed),
        separation=separate(flights, performance, span_s, objectives.tpot_s),
        prediction=Prediction(
            sum(errors) / len(errors), sum(abs(e) < replayed.workload.header.block_tokens for e in errors) / len(errors)
        ),
        index_blocks=index.blocks,
        index_bytes=index.used_bytes,
        index_evicted_blocks=index.evicted_blocks,
        cost=cost,
        measured=Measured(_spread([ns / 1000 for ns in replayed.router.decision_ns]), wall_s),
    )


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Spread(p50, p90, p99, float(np.mean(values)))


def _is_good(flight: Flight, objectives: Objectives) -> bool:
    tpot_s = flight.tpot_s
    return flight.ttft_s <= objectives.ttft_s and (tpot_s is None or tpot_s <= objectives.tpot_s)


def _balances(flights: Sequence[Flight], replayed: Replayed) -> dict[str, TierBalance]:
    performance = replayed.fleet.performance
    capacities = (0, performance.host_tokens, performance.disk_tokens, replayed.fleet.pool_tokens)
    balances = {}
    for tier in (Tier.HOST, Tier.DISK, Tier.POOL):
        if not capacities[tier]:
            continue
        hits = [flight.hit_tokens[tier] for flight in flights]
        balances[tier.name.lower()] = TierBalance(
            hit_tokens=sum(hits),
            fetch_s=performance.fetch_s(_alone(tier, sum(hits))),
            recompute_s=sum(_recompute_s(performance, flight, tier) for flight in flights),
            declined_tokens=sum(flight.declined[tier] for flight in flights),
            capacity_tokens=capacities[tier],
        )
    return balances


def _recompute_s(performance: EnginePerformance, flight: Flight, tier: Tier) -> float:
    """Return what computing a flight's hits of one tier had cost, behind the faster tiers' hits."""
    before = sum(flight.hit_tokens[:tier])
    return performance.prefill_s(flight.hit_tokens[tier], before) - performance.request_overhead_s


def _alone(tier: Tier, tokens: int) -> tuple[int, int, int, int]:
    host, disk, pool = (tokens if tier is other else 0 for other in (Tier.HOST, Tier.DISK, Tier.POOL))
    return 0, host, disk, pool
