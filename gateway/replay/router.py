"""The gateway of a simulated fleet: the production index, policy and load accounting, and nothing of its own.

The index learns what real gateways learn: KV events, seen ``event_delay_s`` after the change; or, for engines that
publish none, ``radix_index.predict`` with each answer's cached tokens. Policies never see an answer's length.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.policy.costs import EngineCosts
from gateway.policy.load import Load, Reservation, total
from gateway.policy.places import Places
from gateway.replay.engine_model import Flight
from gateway.replay.errors import ParameterError
from gateway.replay.performance import EnginePerformance
from gateway.replay.workload import Workload
from gateway.routing import POLICIES, InstanceView, Request, Surroundings, decide, fastest_tier, usable_hits
from kvstore.page import Tier
from radix_index.base import HashArray, Knowledge, PrefixIndex
from radix_index.predict import Expectation, PredictedResidency

POOL = "pool"


class Learning(StrEnum):
    """How the gateway knows what engines hold."""

    EVENTS = "events"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What the gateway is set to."""

    policy: str = "expected-ttft"
    learning: Learning = Learning.EVENTS
    event_delay_s: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class _Routed:
    """What is kept of a request until its end."""

    reservation: Reservation
    run: int
    tip: int | None
    expectation: Expectation | None


class SimulatedRouter:
    """Routes flights; ``decision_ns`` are measured on this machine, everything else is simulated."""

    def __init__(
        self,
        workload: Workload,
        performance: EnginePerformance,
        instances: Sequence[str],
        index: PrefixIndex,
        options: RouterOptions,
        *,
        has_pool: bool,
    ) -> None:
        if options.policy not in POLICIES:
            raise ParameterError(f"there is no policy {options.policy!r}; there are {', '.join(POLICIES)}")
        self.index, self.options = index, options
        self.decision_ns: list[int] = []
        costs = EngineCosts(performance.rates())
        self.loads = {name: Load(costs) for name in instances}
        self.places = Places()
        self.predictions: dict[str, PredictedResidency] = {}
        self._workload = workload
        self._block = workload.header.block_tokens
        self._policy = POLICIES[options.policy]()
        self._chance = random.Random(options.seed)
        self._capacity = performance.device_tokens
        self._routed: dict[Flight, _Routed] = {}
        self._events: deque[tuple[float, str, Tier, bool, tuple[int, ...]]] = deque()
        for name in instances:
            if options.learning is Learning.PREDICTED:
                self.predictions[name] = PredictedResidency(index, name, self._block, performance.device_tokens)
            else:
                index.add_instance(name, block_size=self._block, pool=POOL if has_pool else None)

    def changed(self, holder: str, tier: Tier, stored: bool, segments: Sequence[int], now_s: float) -> None:
        """An engine or the pool changed; its event arrives later."""
        if self.options.learning is Learning.EVENTS:
            visible_s = now_s + self.options.event_delay_s
            self._events.append((visible_s, holder, tier, stored, tuple(segments)))

    def route(self, flight: Flight, now_s: float) -> str:
        """Choose an instance for a request, reserve its load there and return its name."""
        self._apply_events(now_s)
        hashes = self._workload.hashes(flight.request.path)
        begun_ns = time.perf_counter_ns()
        prompt_tokens = flight.request.prompt_tokens
        run, request = self._request(flight)
        decision = decide(self._views(hashes, prompt_tokens, now_s), request, self._policy, self._chance, now_s)
        assert decision is not None  # simulated instances are always healthy
        reservation = self.loads[decision.instance].reserve(
            prompt_tokens,
            max(prompt_tokens - decision.predicted_hit_tokens, 0),
            now_s,
            request.asked.output_tokens,
            decision.fetch_tokens,
        )
        self.places.served(reservation.prompt_tokens, reservation.prompt_s)
        self.places.begun(run, now_s)
        self.decision_ns.append(time.perf_counter_ns() - begun_ns)
        flight.instance, flight.predicted_hit_tokens = decision.instance, decision.predicted_hit_tokens
        prediction = self.predictions.get(decision.instance)
        expectation = None if prediction is None else prediction.expect(hashes, prompt_tokens)
        tip = int(hashes[-1]) if len(hashes) else None
        self._routed[flight] = _Routed(reservation, run, tip, expectation)
        return decision.instance

    def _request(self, flight: Flight) -> tuple[int, Request]:
        """Return the run that a flight belongs to, and what is to be routed; in open traces every flight is its own."""
        request = flight.request
        run = request.session if request.session >= 0 else -1 - request.number
        return run, Request(self.places.asked(run, request.prompt_tokens), str(run))

    def first_token(self, flight: Flight, now_s: float) -> None:
        """The first token of a request was seen."""
        routed = self._routed[flight]
        routed.reservation.answered(now_s)
        if routed.expectation is not None:
            self.predictions[flight.instance].computed(routed.expectation)

    def finished(self, flight: Flight) -> None:
        """A request is over and its usage known."""
        routed = self._routed.pop(flight)
        now_s, instance, output = flight.finished_s, flight.instance, flight.request.output_tokens
        routed.reservation.release(now_s)
        if not flight.was_refused:
            routed.reservation.counted(output)
            self.places.outputs.seen(routed.run, output)
            self.places.ended(routed.run, instance, routed.tip, now_s, lambda block: self._tier_of(instance, block))
        if routed.expectation is not None and not flight.was_refused:
            self.predictions[flight.instance].answered(routed.expectation, sum(flight.hit_tokens))

    def check(self) -> None:
        """Verify that all load was given back; raises ``AssertionError``. For the end of a run."""
        assert not self._routed
        assert total(self.loads.values()) == (0, 0)

    def _tier_of(self, instance: str, block: int) -> int | None:
        return fastest_tier(self.index.match([block], (instance,))[instance].tier_blocks)

    def _views(self, hashes: HashArray, prompt_tokens: int, now_s: float) -> list[InstanceView]:
        matches = self.index.match(hashes)
        return [
            InstanceView(
                instance=name,
                hit_tokens=usable_hits(matches[name].tier_blocks, self._block, prompt_tokens),
                load=load,
                around=self._around(name, load, now_s),
                exact=matches[name].knowledge is Knowledge.COMPLETE,
            )
            for name, load in self.loads.items()
        ]

    def _around(self, name: str, load: Load, now_s: float) -> Surroundings:
        return self.places.around(name, load, self._capacity, now_s)

    def _apply_events(self, now_s: float) -> None:
        """Let the index see what it can know by now."""
        while self._events and self._events[0][0] <= now_s:
            _, holder, tier, stored, segments = self._events.popleft()
            hashes = self._workload.hashes(segments)
            if stored:
                self.index.stored(holder, tier, hashes)
            else:
                self.index.removed(holder, tier, hashes)
