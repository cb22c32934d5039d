"""The virtual clock: arrivals, engines and router in one thread, in the order of time. Equal seeds, equal results."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gateway.replay.caches import DeviceCache, EngineCaches, LowerCache
from gateway.replay.engine_model import Flight, SimulatedEngine
from gateway.replay.errors import ParameterError
from gateway.replay.performance import EnginePerformance
from gateway.replay.router import POOL, RouterOptions, SimulatedRouter
from gateway.replay.workload import TraceRequest, Workload, infinite_hits
from kvstore.page import Tier
from radix_index.index import RadixIndex

_LOAD_BATCH = 16


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The simulated fleet."""

    performance: EnginePerformance
    instances: int
    pool_tokens: int = 0
    index_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How the trace is played.

    Open traces arrive ``speed`` times as fast as recorded. Closed ones are run by ``users``, each one session after
    another in a shuffled order, ``gap_s`` apart on average, thinking as recorded but at most ``think_limit_s``; they
    start over the first ``ramp_s``, and nothing new is asked after ``horizon_s``.
    """

    speed: float = 1.0
    users: int = 1
    horizon_s: float | None = None
    think_limit_s: float = 600.0
    gap_s: float = 30.0
    ramp_s: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Replayed:
    """What came out of one run, in the order of arrival."""

    workload: Workload
    fleet: FleetOptions
    load: LoadOptions
    router: SimulatedRouter
    engines: list[SimulatedEngine]
    flights: list[Flight] = field(default_factory=list)
    ended_s: float = 0.0


class Simulation:
    """One trace, one fleet, one policy. ``run`` may be called once."""

    def __init__(self, workload: Workload, fleet: FleetOptions, load: LoadOptions, router: RouterOptions) -> None:
        if fleet.instances < 1 or load.users < 1 or load.speed <= 0:
            raise ParameterError("instances, users and speed must be above 0")
        self._workload, self._load = workload, load
        self._now_s = 0.0
        self._due: list[tuple[float, int, TraceRequest | SimulatedEngine, int]] = []
        self._entries = 0
        self._versions: dict[SimulatedEngine, int] = {}
        self._arrivals_chance = random.Random(load.seed)
        self._sessions: list[TraceRequest] = []
        names = [f"engine-{number}" for number in range(fleet.instances)]
        index = RadixIndex(byte_budget=fleet.index_bytes)
        self._router = SimulatedRouter(
            workload, fleet.performance, names, index, router, has_pool=bool(fleet.pool_tokens)
        )
        pool = self._lower_cache(POOL, Tier.POOL, fleet.pool_tokens)
        self._engines = {name: self._engine(name, fleet.performance, pool) for name in names}
        self._result = Replayed(workload, fleet, load, self._router, list(self._engines.values()))

    def run(self) -> Replayed:
        """Play the trace until every request that came is answered."""
        self._schedule_arrivals()
        horizon_s = float("inf") if self._load.horizon_s is None else self._load.horizon_s
        while self._due:
            at_s, _, what, version = heapq.heappop(self._due)
            if isinstance(what, TraceRequest):
                if at_s <= horizon_s:
                    self._now_s = at_s
                    self._arrive(what)
            elif self._versions[what] == version:
                self._now_s = at_s
                what.run(at_s)
                self._reschedule(what)
        self._result.ended_s = self._now_s
        return self._result

    def _engine(self, name: str, performance: EnginePerformance, pool: LowerCache) -> SimulatedEngine:
        segments = self._workload.segment_tokens
        caches = EngineCaches(
            DeviceCache(performance.device_tokens, segments, partial(self._changed, name)),
            self._lower_cache(name, Tier.HOST, performance.host_tokens),
            self._lower_cache(name, Tier.DISK, performance.disk_tokens),
            pool,
        )
        engine = SimulatedEngine(name, self._workload, performance, caches, self._router.first_token, self._finished)
        self._versions[engine] = 0
        return engine

    def _lower_cache(self, holder: str, tier: Tier, tokens: int) -> LowerCache:
        return LowerCache(tier, tokens, self._workload.segment_tokens, partial(self._changed, holder))

    def _changed(self, holder: str, tier: Tier, stored: bool, segments: Sequence[int]) -> None:
        self._router.changed(holder, tier, stored, segments, self._now_s)

    def _push(self, at_s: float, what: TraceRequest | SimulatedEngine, version: int = 0) -> None:
        self._entries += 1
        heapq.heappush(self._due, (at_s, self._entries, what, version))

    def _reschedule(self, engine: SimulatedEngine) -> None:
        self._versions[engine] += 1
        at_s = engine.next_event_s()
        if at_s is not None:
            self._push(at_s, engine, self._versions[engine])

    def _schedule_arrivals(self) -> None:
        requests = self._workload.requests
        if not self._workload.header.closed:
            for request in requests:
                self._push(request.at_s / self._load.speed, request)
            return
        self._sessions = [request for request in requests if request.is_first]
        self._arrivals_chance.shuffle(self._sessions)
        for user in range(self._load.users):
            self._next_session(self._load.ramp_s * user / self._load.users)

    def _next_session(self, at_s: float) -> None:
        if self._sessions:
            self._push(at_s, self._sessions.pop())

    def _arrive(self, request: TraceRequest) -> None:
        flight = Flight(request, self._now_s)
        self._result.flights.append(flight)
        engine = self._engines[self._router.route(flight, self._now_s)]
        engine.submit(flight, self._now_s)
        self._reschedule(engine)

    def _finished(self, flight: Flight, now_s: float) -> None:
        self._router.finished(flight)
        if not self._workload.header.closed:
            return
        following = flight.request.next
        if following is not None:
            self._push(now_s + min(following.think_s, self._load.think_limit_s), following)
        else:
            self._next_session(now_s + self._arrivals_chance.expovariate(1 / self._load.gap_s))


def load_for_share(workload: Workload, fleet: FleetOptions, share: float, base: LoadOptions) -> tuple[float, int]:
    """Return (speed, users) that ask for ``share`` of what the fleet could do under an infinite shared cache.

    The work of a request: its uncached prefill, and its decode steps at a batch of 16, each bearing a 16th.
    """
    if share <= 0:
        raise ParameterError("the load must be above 0")
    performance, work_s, session_s = fleet.performance, 0.0, 0.0
    for request, hit in zip(workload.requests, infinite_hits(workload, workload.requests), strict=True):
        step_s = performance.decode_step_s(_LOAD_BATCH, _LOAD_BATCH * request.prompt_tokens)
        decode_s = request.output_tokens * step_s
        work_s += performance.prefill_s(request.prompt_tokens - hit, hit) + decode_s / _LOAD_BATCH
        think_s = base.gap_s if request.is_first else min(request.think_s, base.think_limit_s)
        session_s += think_s + decode_s
    capacity = share * fleet.instances
    if workload.header.closed:
        return 1.0, max(1, round(capacity * session_s / work_s))
    return capacity * max(workload.span_s, 1.0) / work_s, 1
