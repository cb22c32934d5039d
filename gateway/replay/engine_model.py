"""One simulated engine: a queue, one prompt in prefill at a time, and a batch that decodes.

Between two events every rate is constant, so the engine needs no step-by-step clock. While a prompt is computed, each
iteration takes a chunk of it together with one token for every running sequence (chunked prefill)::

    iteration = the chunk's compute time + the running contexts' KV reads

and both move on at that pace; without a prompt an iteration is a decode step. A request starts when its fetch from
lower tiers is done and its uncached prompt and its whole answer fit into device memory; it waits in line otherwise,
letting those pass that are still being fetched.

Fetch or recompute: from the blocks that follow the device's match in lower tiers the engine fetches the leading run
that saves most time, which may be none. Fetches of one engine run one after another over its link, beside its queue.
What was on the device when a request came and is evicted while it waits is fetched too, where a lower tier has it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ulp

from gateway.replay.caches import EngineCaches
from gateway.replay.performance import EnginePerformance
from gateway.replay.workload import TraceRequest, Workload
from kvstore.page import Tier

EPSILON_S, EPSILON_STEPS = 1e-9, 1e-6
TierTokens = tuple[int, int, int, int]


@dataclass(slots=True, eq=False)
class Flight:
    """One request from its arrival to its end. Times are seconds of the virtual clock."""

    request: TraceRequest
    arrived_s: float
    instance: str = ""
    predicted_hit_tokens: int = 0
    ready_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    hit_tokens: TierTokens = (0, 0, 0, 0)
    fetched_s: float = 0.0
    wasted_tokens: int = 0  # fetched, but what stood before them was lost meanwhile
    declined: TierTokens = (0, 0, 0, 0)  # held in lower tiers, and faster to recompute than to fetch
    prefill_s: float = 0.0
    was_refused: bool = False  # larger than the device
    fetch_from: int = 0  # segments on the device when the fetch was planned
    pinned: int = 0
    tail_tokens: int = 0
    tiers: list[Tier] = field(default_factory=list)  # of the fetched segments

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` for an answer of one token."""
        gaps = self.request.output_tokens - 1
        return (self.finished_s - self.first_token_s) / gaps if gaps else None


@dataclass(slots=True)
class EngineSeconds:
    """What an engine spent, in seconds."""

    prefill: float = 0.0  # compute of prompts alone, as if nothing else had run
    busy: float = 0.0
    fetching: float = 0.0


class SimulatedEngine:
    """See the module. The owner advances it to ``next_event_s`` and calls ``run``."""

    def __init__(
        self,
        name: str,
        workload: Workload,
        performance: EnginePerformance,
        caches: EngineCaches,
        on_first_token: Callable[[Flight, float], None],
        on_finished: Callable[[Flight, float], None],
    ) -> None:
        self.name, self.performance, self.caches = name, performance, caches
        self.spent = EngineSeconds()
        self._workload = workload
        self._on_first_token, self._on_finished = on_first_token, on_finished
        self._queue: deque[Flight] = deque()
        self._prefilling: Flight | None = None
        self._prefill_left_s = 0.0
        self._chunk_s = 0.0
        self._decoding: list[tuple[float, int, Flight]] = []  # heap by the step at which the answer ends
        self._steps = 0.0
        self._context_tokens = 0.0  # of all that decode; an answer counts with half its length
        self._link_free_s = 0.0
        self._now_s = 0.0
        self._waits_for_memory = False

    def submit(self, flight: Flight, now_s: float) -> None:
        """Take a request."""
        self.advance(now_s)
        request = flight.request
        if request.prompt_tokens + request.output_tokens > self.caches.device.capacity_tokens:
            flight.was_refused = True
            flight.first_token_s = flight.finished_s = now_s
            self._on_finished(flight, now_s)
            return
        flight.ready_s = now_s
        if self.caches.has_lower:
            self._plan_fetch(flight, now_s)
        self._queue.append(flight)
        self._start(now_s)

    def advance(self, now_s: float) -> None:
        """Let the time pass; nothing ends before ``next_event_s``."""
        passed = now_s - self._now_s
        self._now_s = now_s
        if passed <= 0 or (self._prefilling is None and not self._decoding):
            return
        self.spent.busy += passed
        iterations = passed / self._iteration_s()
        if self._decoding:
            self._steps += iterations
        if self._prefilling is not None:
            self._prefill_left_s -= iterations * self._chunk_s

    def run(self, now_s: float) -> None:
        """Do what is due now: first tokens, ends, starts."""
        self.advance(now_s)
        slack_s = _slack_s(now_s)
        reached = self._steps + slack_s / self._iteration_s() + EPSILON_STEPS
        if self._prefilling is not None and self._prefill_left_s <= slack_s:
            self._prefilled(self._prefilling, now_s)
        while self._decoding and self._decoding[0][0] <= reached:
            self._finish(heapq.heappop(self._decoding)[2], now_s)
        self._start(now_s)

    def next_event_s(self) -> float | None:
        """Return when something will be due; ``None`` when idle."""
        due = []
        if self._prefilling is not None:
            due.append(self._now_s + max(self._prefill_left_s, 0.0) / self._chunk_s * self._iteration_s())
        elif self._queue and not self._waits_for_memory and len(self._decoding) < self.performance.running_limit:
            due.append(max(self._now_s, min(flight.ready_s for flight in self._queue)))
        if self._decoding:
            due.append(self._now_s + max(self._decoding[0][0] - self._steps, 0.0) * self._iteration_s())
        return min(due, default=None)

    def check(self) -> None:
        """Verify what is held against who holds it; raises ``AssertionError``."""
        held = sum(flight.tail_tokens for _, _, flight in self._decoding)
        if self._prefilling is not None:
            flight = self._prefilling
            path = flight.request.path
            whole = self._workload.prefix_tokens(path, len(path))
            held += flight.tail_tokens + whole - self._workload.prefix_tokens(path, flight.pinned)
        self.caches.device.check(held)
        for cache in (self.caches.host, self.caches.disk, self.caches.pool):
            cache.check()

    def _iteration_s(self) -> float:
        reads = self.performance.decode_reads_s(len(self._decoding), self._context_tokens)
        if self._prefilling is not None:
            return self._chunk_s + reads
        return self.performance.step_overhead_s + self.performance.weights_read_s + reads

    def _plan_fetch(self, flight: Flight, now_s: float) -> None:
        """Choose the run to fetch and queue it on the link."""
        path, tokens = flight.request.path, self._workload.segment_tokens
        flight.fetch_from = self.caches.device.match(path)
        start = self._workload.prefix_tokens(path, flight.fetch_from)
        found, tiers, best, best_s, best_fetch_s = [0, 0, 0, 0], list[Tier](), 0, 0.0, 0.0
        for position in range(flight.fetch_from, len(path)):
            tier = self.caches.lower_tier(path[position])
            if tier is None:
                break
            tiers.append(tier)
            found[tier] += tokens[path[position]]
            fetch_s = self.performance.fetch_s((0, found[1], found[2], found[3]))
            saved_s = self.performance.prefill_s(sum(found), start) - self.performance.request_overhead_s - fetch_s
            if saved_s > best_s:
                best, best_s, best_fetch_s = len(tiers), saved_s, fetch_s
        flight.tiers = tiers[:best]
        flight.declined = self._by_tier(path, flight.fetch_from + best, tiers[best:])
        if best:
            self._queue_fetch(flight, best_fetch_s, now_s)

    def _start(self, now_s: float) -> None:
        """Begin the first queued request that is ready, if there is room for it."""
        self._waits_for_memory = False
        if self._prefilling is not None or len(self._decoding) >= self.performance.running_limit:
            return
        flight = self._next_ready(now_s)
        if flight is None:
            return
        request, device = flight.request, self.caches.device
        path = request.path
        on_device = device.match(path)
        whole = self._workload.prefix_tokens(path, len(path))
        have = self._workload.prefix_tokens(path, on_device)
        device.pin(path[:on_device])
        tail = request.prompt_tokens - whole + request.output_tokens
        if not device.take(whole - have + tail):
            device.unpin(path[:on_device])
            self._waits_for_memory = True
            return
        self._queue.remove(flight)
        flight.started_s, flight.pinned, flight.tail_tokens = now_s, on_device, tail
        self._count_hits(flight, on_device)
        cached = sum(flight.hit_tokens)
        fresh = request.prompt_tokens - cached
        flight.prefill_s = self._prefill_left_s = self.performance.prefill_s(fresh, cached)
        self._chunk_s = flight.prefill_s / -(-fresh // self.performance.chunk_tokens)
        self.spent.prefill += flight.prefill_s
        self._prefilling = flight

    def _next_ready(self, now_s: float) -> Flight | None:
        """Return the first in line that waits for no fetch."""
        due_s = now_s + _slack_s(now_s)
        for flight in self._queue:
            if flight.ready_s <= due_s and not (self.caches.has_lower and self._fetch_again(flight, now_s)):
                return flight
        return None

    def _fetch_again(self, flight: Flight, now_s: float) -> bool:
        """Fetch what was on the device when the request came and was evicted while it waited; whether there is any."""
        path, on_device = flight.request.path, self.caches.device.match(flight.request.path)
        if on_device >= flight.fetch_from:
            return False
        gap = list[Tier]()
        for segment in path[on_device : flight.fetch_from]:
            tier = self.caches.lower_tier(segment)
            if tier is None:
                break
            gap.append(tier)
        is_whole = len(gap) == flight.fetch_from - on_device
        gap_tokens = self._by_tier(path, on_device, gap)
        reach = sum(gap_tokens) + (sum(self._by_tier(path, flight.fetch_from, flight.tiers)) if is_whole else 0)
        start = self._workload.prefix_tokens(path, on_device)
        saved_s = self.performance.prefill_s(reach, start) - self.performance.request_overhead_s
        fetch_s = self.performance.fetch_s(gap_tokens)
        worth_it = saved_s > fetch_s
        if not (worth_it and is_whole):
            flight.wasted_tokens += sum(self._by_tier(path, flight.fetch_from, flight.tiers))
            flight.tiers = []
        flight.fetch_from = on_device
        if worth_it:
            flight.tiers = gap + flight.tiers
            self._queue_fetch(flight, fetch_s, now_s)
        return worth_it

    def _by_tier(self, path: Sequence[int], start: int, tiers: Sequence[Tier]) -> TierTokens:
        """Return the tokens of the segments from ``start`` on that come from these tiers."""
        tokens = [0, 0, 0, 0]
        for segment, tier in zip(path[start:], tiers, strict=False):
            tokens[tier] += self._workload.segment_tokens[segment]
        return tokens[0], tokens[1], tokens[2], tokens[3]

    def _queue_fetch(self, flight: Flight, fetch_s: float, now_s: float) -> None:
        flight.fetched_s += fetch_s
        self.spent.fetching += fetch_s
        self._link_free_s = flight.ready_s = max(now_s, self._link_free_s) + fetch_s

    def _count_hits(self, flight: Flight, on_device: int) -> None:
        """Split what need not be computed by the tier that it comes from; the last token is always computed."""
        path, tokens = flight.request.path, self._workload.segment_tokens
        hits = [self._workload.prefix_tokens(path, on_device), 0, 0, 0]
        for position, tier in enumerate(flight.tiers, start=flight.fetch_from):
            if position >= on_device:
                hits[tier] += tokens[path[position]]
        excess = max(sum(hits) - (flight.request.prompt_tokens - 1), 0)
        for tier in reversed(Tier):
            cut = min(excess, hits[tier])
            hits[tier] -= cut
            excess -= cut
        flight.hit_tokens = (hits[0], hits[1], hits[2], hits[3])

    def _prefilled(self, flight: Flight, now_s: float) -> None:
        request = flight.request
        self._prefilling = None
        self.caches.device.insert(request.path[flight.pinned :])
        if self.caches.has_lower:
            self.caches.write_through(request.path)
        flight.first_token_s = now_s
        heapq.heappush(self._decoding, (self._steps + request.output_tokens - 1, request.number, flight))
        self._context_tokens += request.prompt_tokens + request.output_tokens / 2
        self._on_first_token(flight, now_s)

    def _finish(self, flight: Flight, now_s: float) -> None:
        request = flight.request
        self._context_tokens -= request.prompt_tokens + request.output_tokens / 2
        self.caches.device.unpin(request.path)
        self.caches.device.give(flight.tail_tokens)
        flight.finished_s = now_s
        self._on_finished(flight, now_s)


def _slack_s(now_s: float) -> float:
    """Return what counts as due: a clock that is far from 0 cannot show shorter times."""
    return EPSILON_S + 4 * ulp(now_s)
