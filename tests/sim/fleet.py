"""Engines that fail, and the gateway's deciding parts in front of them, on a virtual clock.

Every event is followed by a check: each request is in exactly one place, loads are the sums of what was reserved, what
is in the index is held by somebody who lives, nothing goes where nobody takes requests. ``run`` raises
``AssertionError`` with the seed where one fails. The same seed gives the same run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from gateway.breaker import State
from gateway.policy.costs import EngineCosts, Rates
from gateway.policy.load import total
from gateway.policy.places import Places
from gateway.routing import NO_HITS, POLICIES, InstanceView, Request, decide, fastest_tier, usable_hits
from kvstore.page import Tier
from radix_index.base import HashArray
from radix_index.index import RadixIndex
from tests.sim.engine import Engine, Flight, Part, Run

BLOCK = 64
ATTEMPTS = 3
SILENCE_S = 20.0
_RATES = Rates(prefill=5_000.0, host=1e5, disk=3e4, pool=1e4)
_TOKEN_S, _STEP_S, _OVERHEAD_S = 1 / 12_000, 0.02, 0.01
_RUN_STEPS = 12
_DEEP_EVERY = 512
_LOOK_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """How much is simulated. ``fault_every_s``: the mean time between faults of the whole fleet."""

    requests: int = 20_000
    instances: int = 64
    seed: int = 0
    policy: str = "expected-ttft"
    requests_per_s: float = 40.0
    fault_every_s: float = 5.0
    capacity_blocks: int = 2_000


@dataclass(slots=True)
class Summary:
    """What became of all requests, and of the fleet."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    hit_blocks: int = 0
    prompt_blocks: int = 0
    simulated_s: float = 0.0


class Simulation:
    """See the module."""

    def __init__(self, options: Options) -> None:
        self.options, self.chance = options, random.Random(options.seed)
        self.index, self.places = RadixIndex(), Places()
        names, costs = [f"i{number:02}" for number in range(options.instances)], EngineCosts(_RATES)
        self.engines = {name: Engine(name, costs, random.Random(number)) for number, name in enumerate(names)}
        for name in self.engines:
            self.index.add_instance(name, block_size=BLOCK)
        self.policy, self.now_s, self.summary = POLICIES[options.policy](), 0.0, Summary()
        self.flights: dict[int, Flight] = {}
        self.has_ended = bytearray(options.requests)
        self.ended = self.reserved = 0
        self._touched: set[Engine] = set()  # since the last check
        self._events: list[tuple[float, int, str, tuple[object, ...]]] = []
        self._order = self._sent = self._runs = 0
        self._heads = [self._new_part(8 + 8 * n) for n in range(20)]

    # --- the run ---

    def run(self) -> Summary:
        """Simulate all requests; raises ``AssertionError``, naming the seed, when something is wrong."""
        options = self.options
        try:
            self._at(0.0, "arrive")
            self._at(self.chance.expovariate(1 / options.fault_every_s), "fault")
            while self._events and self.ended < options.requests:
                self.now_s, _, kind, details = heappop(self._events)
                getattr(self, f"_on_{kind}")(*details)
                self._check_step()
            self._check_end()
        except AssertionError as error:
            raise AssertionError(f"seed {options.seed}, at {self.now_s:.3f} s: {error}") from error
        self.summary.simulated_s = self.now_s
        return self.summary

    def _at(self, delay_s: float, kind: str, *details: object) -> None:
        self._order += 1
        heappush(self._events, (self.now_s + delay_s, self._order, kind, details))

    def _new_part(self, blocks: int) -> Part:
        return Part(np.frombuffer(self.chance.randbytes(8 * blocks), np.uint64))

    # --- requests ---

    def _on_arrive(self, run: Run | None = None) -> None:
        if run is None:
            self._at(self.chance.expovariate(self.options.requests_per_s / _RUN_STEPS), "arrive")
        if self._sent >= self.options.requests:
            return
        if run is None:
            self._runs += 1
            steps = self.chance.randrange(1, 2 * _RUN_STEPS)
            head = self.chance.choice(self._heads)
            run = Run(self._runs, [head], head.hashes, steps)
        part = self._new_part(self.chance.randrange(1, 12))
        run.parts.append(part)
        run.hashes = np.concatenate([run.hashes, part.hashes])
        flight = Flight(self._sent, run, self.chance.randrange(4, 300))
        self._sent += 1
        self.flights[flight.number] = flight
        self._route(flight)

    def _route(self, flight: Flight) -> None:
        hashes, tokens = flight.run.hashes, len(flight.run.hashes) * BLOCK + 7
        views = self._views(hashes, tokens)
        run, places = flight.run.number, self.places
        asked = places.asked(run, tokens)
        decision = None
        if flight.attempt < ATTEMPTS:
            tried = frozenset(flight.tried)
            decision = decide(views, Request(asked, str(run)), self.policy, self.chance, self.now_s, without=tried)
        if decision is None:
            self._end(flight, "unanswered")
            return
        engine = self.engines[decision.instance]
        assert engine.takes_requests, f"request {flight.number} goes to {engine.name}, which takes none"
        assert engine.name not in flight.tried, f"request {flight.number} goes to {engine.name} again"
        self._touched.add(engine)
        flight.tried.add(engine.name)
        flight.attempt += 1
        flight.at, flight.life = engine.name, engine.life
        view = next(view for view in views if view.instance == engine.name)
        flight.reservation = engine.load.reserve(tokens, view.fresh_tokens(tokens), self.now_s, asked.output_tokens)
        places.served(flight.reservation.prompt_tokens, flight.reservation.prompt_s)
        places.begun(run, self.now_s)
        flight.ticket = engine.breaker.begin(self.now_s)
        coming = hashes[view.matched_blocks :]
        flight.pending = self.index.reserve(engine.name, coming) if len(coming) else None
        self.summary.attempts += 1
        if not engine.is_up:
            self._lost(engine)
            self._leave(flight, failed=False)
            self._route(flight)
            return
        engine.flights[flight.number] = flight
        if engine.is_silent:
            self._at(SILENCE_S, "timeout", flight, flight.attempt)
            return
        known = engine.known_blocks(flight.run.parts)
        self.summary.hit_blocks += known
        self.summary.prompt_blocks += len(hashes)
        work_s = engine.pace * (_OVERHEAD_S + (tokens - min(known * BLOCK, tokens - 1)) * _TOKEN_S)
        engine.free_s = max(engine.free_s, self.now_s) + work_s
        self._at(engine.free_s - self.now_s, "first", flight, flight.attempt)

    def _views(self, hashes: HashArray, tokens: int) -> list[InstanceView]:
        matches, capacity, views = self.index.match(hashes), self.options.capacity_blocks * BLOCK, []
        found = {name: row for name, row in zip(matches, matches.counts.tolist(), strict=True) if any(row)}
        for name, engine in self.engines.items():
            is_healthy, view = engine.takes_requests and engine.breaker.admits(self.now_s), engine.bare_view
            if view is None or self.now_s >= engine.look_again_s or view.healthy != is_healthy:
                around = self.places.around(name, engine.load, capacity, self.now_s)
                view = engine.bare_view = InstanceView(name, NO_HITS, engine.load, around, is_healthy)
                engine.look_again_s = self.now_s + _LOOK_AGAIN_S
            if name in found:
                *tiers, coming = found[name]
                hits = usable_hits(tiers, BLOCK, tokens)
                pending = min(coming * BLOCK, tokens - 1 - sum(hits))
                view = InstanceView(
                    name, hits, engine.load, view.around, is_healthy, pending_tokens=pending, matched_blocks=sum(tiers)
                )
            views.append(view)
        return views

    def _is_there(self, flight: Flight, attempt: int) -> bool:
        """Tell whether an engine's event still concerns somebody: not where it died, or the request went on."""
        if flight.number not in self.flights or flight.attempt != attempt or flight.at is None:
            return False
        engine = self.engines[flight.at]
        return engine.life == flight.life and not engine.is_silent

    def _on_first(self, flight: Flight, attempt: int) -> None:
        if not self._is_there(flight, attempt):
            return
        engine = self.engines[flight.at or ""]
        assert flight.reservation is not None
        assert flight.ticket is not None
        flight.reservation.answered(self.now_s)
        engine.breaker.succeeded(flight.ticket, self.now_s)
        self._store(engine, flight.run.parts)
        self._at(flight.output * _STEP_S * engine.pace, "done", flight, attempt)

    def _on_done(self, flight: Flight, attempt: int) -> None:
        if not self._is_there(flight, attempt):
            return
        engine, reservation, run = self.engines[flight.at or ""], flight.reservation, flight.run
        self._leave(flight, failed=False)
        assert reservation is not None
        reservation.counted(flight.output)
        self.places.outputs.seen(run.number, flight.output)
        tip = int(run.hashes[-1])
        self.places.ended(run.number, engine.name, tip, self.now_s, lambda block: self._tier_of(engine.name, block))
        self._end(flight, "answered")

    def _tier_of(self, name: str, block: int) -> int | None:
        return fastest_tier(self.index.match([block], (name,))[name].tier_blocks)

    def _on_timeout(self, flight: Flight, attempt: int) -> None:
        if flight.number not in self.flights or flight.attempt != attempt or flight.at is None:
            return
        self._leave(flight, failed=True)
        self._route(flight)

    def _on_abort(self) -> None:
        """A client leaves at any moment."""
        if self.flights:
            flight = self.flights[self.chance.choice(list(self.flights))]
            self._leave(flight, failed=False)
            self._end(flight, "aborted")

    def _leave(self, flight: Flight, *, failed: bool) -> None:
        """Give back all that the request had at its engine."""
        engine = self.engines[flight.at or ""]
        self._touched.add(engine)
        assert flight.reservation is not None
        assert flight.ticket is not None
        flight.reservation.release(self.now_s)
        if failed:
            engine.breaker.failed(flight.ticket, self.now_s)
        engine.breaker.dropped(flight.ticket)
        if flight.pending is not None:
            self.index.release(flight.pending)
        engine.flights.pop(flight.number, None)
        flight.at = flight.reservation = flight.ticket = flight.pending = None

    def _end(self, flight: Flight, how: str) -> None:
        assert not self.has_ended[flight.number], f"request {flight.number} ends twice"
        self.has_ended[flight.number] = True
        self.ended += 1
        del self.flights[flight.number]
        self.summary.ends[how] += 1
        run = flight.run
        run.steps_left -= 1
        if run.steps_left > 0:
            self._at(self.chance.choice((0.2, 2.0, 8.0)), "arrive", run)

    def _store(self, engine: Engine, parts: Sequence[Part]) -> None:
        new, gone = engine.keep(parts, self.options.capacity_blocks)
        if new:
            self.index.stored(engine.name, Tier.DEVICE, np.concatenate([part.hashes for part in new]))
        if gone:
            self.index.removed(engine.name, Tier.DEVICE, np.concatenate([part.hashes for part in gone]))

    # --- faults ---

    def _on_fault(self) -> None:
        self._at(self.chance.expovariate(1 / self.options.fault_every_s), "fault")
        engine = self.engines[self.chance.choice(list(self.engines))]
        kind = self.chance.choice(("kill", "silence", "slow", "drain", "flush", "abort"))
        self.summary.faults[kind] += 1
        if kind == "abort":
            self._on_abort()
        elif kind == "slow":
            engine.pace = self.chance.choice((0.5, 1.0, 1.0, 4.0))
        elif kind == "flush" and engine.is_up:
            engine.lose_all()
            self.index.cleared(engine.name, (Tier.DEVICE,))
        elif kind == "drain":
            engine.is_draining = True
            self._at(self.chance.uniform(1, 30), "undrain", engine)
        elif kind == "silence" and engine.is_up:
            engine.is_silent = True
            for flight in list(engine.flights.values()):
                self._at(SILENCE_S, "timeout", flight, flight.attempt)
            self._at(self.chance.uniform(1, 60), "kill", engine)
        elif kind == "kill":
            self._on_kill(engine)

    def _on_kill(self, engine: Engine) -> None:
        """The process is gone; the gateway learns of it by what breaks, or by a probe."""
        if not engine.is_up:
            return
        engine.is_up, engine.is_silent, engine.life = False, False, engine.life + 1
        engine.lose_all()
        broken = list(engine.flights.values())
        for flight in broken:
            self._leave(flight, failed=True)
        self._at(self.chance.uniform(0, 2), "probe", engine, engine.life)
        self._at(self.chance.uniform(3, 40), "restart", engine)
        for flight in broken:
            self._route(flight)

    def _on_probe(self, engine: Engine, life: int) -> None:
        if engine.life == life and not engine.is_up:
            self._lost(engine)

    def _lost(self, engine: Engine) -> None:
        """Nobody listens there: nothing more goes there, and what it held is forgotten."""
        if engine.is_known_up:
            engine.is_known_up = False
            self.index.remove_instance(engine.name)
            self.places.forget(engine.name)

    def _on_restart(self, engine: Engine) -> None:
        self._lost(engine)
        engine.is_up = engine.is_known_up = True
        engine.free_s = self.now_s
        self.index.add_instance(engine.name, block_size=BLOCK)
        engine.breaker.came_up(self.now_s)

    def _on_undrain(self, engine: Engine) -> None:
        engine.is_draining = False

    # --- what must hold ---

    def _check_step(self) -> None:
        """After every event: the sums, and every engine that it touched; all of them once in a while."""
        assert len(self.flights) + self.ended == self._sent, "a request is lost, or there twice"
        self._check_touched()
        if self._order % _DEEP_EVERY == 0:
            self._check_deeply()

    def _check_touched(self) -> None:
        for engine in self._touched:
            self._check_engine(engine)
            self.reserved += engine.load.running - engine.checked_running
            engine.checked_running = engine.load.running
        self._touched.clear()
        under_way = len(self.flights)
        assert self.reserved == under_way, f"{self.reserved} requests are reserved, {under_way} are under way"

    def _check_engine(self, engine: Engine) -> None:
        engine.load.check()
        assert engine.load.running == len(engine.flights)
        assert all(flight.at == engine.name for flight in engine.flights.values())
        assert engine.breaker.state in State

    def _check_deeply(self) -> None:
        running, _ = total(engine.load for engine in self.engines.values())
        assert running == self.reserved, "a load changed that nobody touched"
        for engine in self.engines.values():
            self._check_engine(engine)
            assert (engine.name in self.index.instances()) == engine.is_known_up
        assert self.index.stats().reservations <= len(self.flights)
        if all(engine.is_up == engine.is_known_up for engine in self.engines.values()):  # else the dead are remembered
            held = sum(engine.held_blocks for engine in self.engines.values() if engine.is_up)
            coming = sum(len(flight.run.hashes) for flight in self.flights.values())
            assert self.index.stats().blocks <= held + coming, "the index knows blocks that nobody holds"

    def _check_end(self) -> None:
        for flight in list(self.flights.values()):
            self._leave(flight, failed=False)
            self._end(flight, "cut")
        self._check_touched()
        self._check_deeply()
        self.index.check()
        assert total(engine.load for engine in self.engines.values()) == (0, 0)
        assert self.index.stats().reservations == 0
        assert self.ended == sum(self.has_ended) == self._sent
