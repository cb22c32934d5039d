"""One engine, as it was configured and as it is now."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine_adapter.base import Capabilities, EngineAdapter, EventSource, InstanceFacts
from engine_adapter.http import UpstreamResponse
from gateway.absence import Absence
from gateway.breaker import Breaker, BreakerOptions, State
from gateway.errors import NoThreads
from gateway.feeds import Feed
from gateway.policy.costs import EngineCosts, Rates
from gateway.policy.load import Load
from gateway.protocols.base import Ask
from gateway.residency import new_scores
from gateway.tier_use import TierUse
from gateway.told_loads import ToldLoad
from radix_index.base import Knowledge
from radix_index.predict import PredictedResidency

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits that are an instance's own; ``None``: those of all."""

    connect_s: float | None = None
    first_byte_s: float | None = None
    idle_s: float | None = None
    total_s: float | None = None


class EngineRole(StrEnum):
    """What an engine does of a request."""

    BOTH = "both"
    PREFILL = "prefill"  # it computes prompts for engines that decode
    DECODE = "decode"  # it answers, from prompts that were computed elsewhere


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One engine as it was configured. ``headers`` go with every request to it (its key, if it needs one).

    ``capacity_tokens``: what its cache holds, where that must be predicted and the engine itself doesn't tell.
    ``rank``: the data-parallel rank that it stands for, where its server has several.
    """

    id: str
    url: str
    adapter: EngineAdapter
    headers: Mapping[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    pool: str | None = None
    follows_events: bool = True
    capacity_tokens: int | None = None
    speaks: frozenset[str] | None = None  # endpoints that it has itself; ``None``: what its kind has
    rank: int | None = None
    event_sources: tuple[EventSource, ...] = ()  # one for each rank, for engines that don't tell theirs
    tiers: tuple[str, ...] | None = None  # which its events speak of, for engines that don't tell
    timeouts: Timeouts = Timeouts()
    role: EngineRole = EngineRole.BOTH
    bootstrap_port: int = 8998  # where engines that decode find a prefilling one's pages (SGLang)
    region: str | None = None  # where it runs, for prices that differ by it
    repeats: bool | None = None  # whether what may have run there may run again elsewhere; ``None``: as for all
    keeps_out: bool = False  # outside the own network: gets nothing of a model that an instance inside may serve

    def of_rank(self, rank: int) -> InstanceSpec:
        """Return the same for one data-parallel rank."""
        return replace(self, rank=rank, headers={**self.headers, **self.adapter.rank_headers(rank)})


class Standing:
    """Counts the changes of what routing goes by for long: who is there, takes requests, and serves which model.

    Whoever remembers something of it looks at ``changes`` first. Breakers that are not closed, and instances that came
    up lately, change by time alone and must be asked.
    """

    __slots__ = ("changes",)

    def __init__(self) -> None:
        self.changes = 0

    def changed(self) -> None:
        """Something is otherwise now."""
        self.changes += 1


class Instance:
    """One engine as it is now."""

    def __init__(
        self,
        spec: InstanceSpec,
        rates: Rates,
        breaker: BreakerOptions | None = None,
        standing: Standing | None = None,
    ) -> None:
        self.spec = spec
        self._standing = standing or Standing()
        self.breaker = Breaker(breaker or BreakerOptions(), random.Random(spec.id), self._standing.changed)
        self.probed_s = 0.0  # when it was probed last (monotonic)
        self.silent_since_s: float | None = None  # when probes began to meet nobody, or silence (monotonic)
        self.absence = Absence(time.monotonic())
        self.id = spec.id  # its name
        self._idle = asyncio.Event()
        self.load = Load(EngineCosts(rates), on_idle=self._idle.set)
        self.models = spec.models  # that it serves, by its own names
        self.capabilities: Capabilities = spec.adapter.capabilities  # as it says, else what its kind can
        self._facts: InstanceFacts | None = None
        self.was_gone = False  # nobody listened there since it was described
        self.is_in_doubt = False  # it emptied its caches: what it said of itself is to be asked again
        self._is_healthy = self._is_draining = False
        self.answers: set[UpstreamResponse] = set()  # that come from there now
        self._eviction: asyncio.TimerHandle | None = None
        self.trouble: str | None = "not probed yet"
        self.feed: Feed | None = None
        self.predicted: PredictedResidency | None = None  # what it holds, where it publishes no events
        self.scores = new_scores()
        self.tier_use = TierUse()  # which of its tiers it reads, as far as answers tell
        self.told_load = ToldLoad()  # what it says itself, where it does
        self.wake = asyncio.Event()

    def drain(self, limit_s: float | None = None) -> None:
        """Let nothing new go there. At the limit what still runs breaks off there, and goes on elsewhere if it can."""
        self.resume()
        self.is_draining = True
        if limit_s is not None:
            self._eviction = asyncio.get_running_loop().call_later(limit_s, self._evict)

    def resume(self) -> None:
        """Let requests go there again."""
        self.is_draining = False
        if self._eviction is not None:
            self._eviction.cancel()
            self._eviction = None

    def _evict(self) -> None:
        if self.answers:
            _log.warning("instance %s: %d answers break off at the limit of its drain", self.id, len(self.answers))
        for response in list(self.answers):
            response.give_up()

    @property
    def facts(self) -> InstanceFacts | None:
        """What it said of itself, ``None`` before it did."""
        return self._facts

    @facts.setter
    def facts(self, facts: InstanceFacts) -> None:
        self._facts = facts
        self.models = self.spec.models or facts.models
        told = facts.capabilities
        self.capabilities = self.spec.adapter.capabilities if told is None else told
        self._standing.changed()

    @property
    def is_healthy(self) -> bool:
        """Whether somebody answers there."""
        return self._is_healthy

    @is_healthy.setter
    def is_healthy(self, is_healthy: bool) -> None:
        if is_healthy != self._is_healthy:
            self._is_healthy = is_healthy
            self._standing.changed()

    @property
    def is_draining(self) -> bool:
        """Whether what runs there may end, and nothing new begins."""
        return self._is_draining

    @is_draining.setter
    def is_draining(self, is_draining: bool) -> None:
        if is_draining != self._is_draining:
            self._is_draining = is_draining
            self._standing.changed()

    @property
    def rates(self) -> Rates:
        """How fast it is, as far as that is learned."""
        return self.load.costs.learned()

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go there."""
        if not self._is_healthy or self._is_draining:
            return False
        return self.breaker.state is State.CLOSED or self.breaker.admits(time.monotonic())

    def rest_s(self, now_s: float) -> float:
        """Return in how many seconds it will probably take requests."""
        if self.is_draining:
            return math.inf
        return self.breaker.rest_s(now_s) if self.is_healthy else self.absence.rest_s(now_s)

    def is_silent_for(self, limit_s: float) -> bool:
        """Tell whether nobody has answered a probe for so long: who waits there for an answer waits in vain."""
        since_s = self.silent_since_s
        return since_s is not None and time.monotonic() - since_s >= limit_s

    def speaks(self, endpoint: str) -> bool:
        """Tell whether it has the endpoint itself."""
        own = self.spec.speaks
        return endpoint in (self.capabilities.endpoints if own is None else own)

    def reads(self, ask: Ask) -> bool:
        """Tell whether it can read a request as its client wrote it. Engines that hold no conversations would take a
        turn of one for the whole, and say nothing."""
        return self.speaks(ask.endpoint) and (self.capabilities.threads or not isinstance(ask.refusal, NoThreads))

    async def until_idle(self) -> None:
        """Wait until no request is there any more."""
        while self.load.running:
            self._idle.clear()
            await self._idle.wait()

    @property
    def knowledge(self) -> Knowledge | None:
        """How far the index can be trusted about it; ``None`` where it publishes no events."""
        return None if self.feed is None else self.feed.knowledge
