"""The instances: which there are, which can serve, what they hold, and how busy they are.

Each instance is watched by one task: probe until it is up, ask it what it is, follow its events while it lives, forget
what it held when it is gone. A refused connection, seen by a probe or by a request, takes it out at once; a slow probe
only stops new requests until the next good one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from engine_adapter.base import EventSource, InstanceFacts
from engine_adapter.errors import ConnectFailed, UpstreamError
from engine_adapter.http import UpstreamClient
from gateway.absence import retry_after_s, until_probe_s
from gateway.breaker import BreakerOptions, Ticket
from gateway.feeds import Feed
from gateway.instance import EngineRole, Instance, InstanceSpec, Standing
from gateway.policy.costs import EngineCosts, Rates
from gateway.residency import predicted_residency
from gateway.snapshots import RANK_MARK, IndexSnapshots
from gateway.told_loads import LoadTeller, follow_load
from kvstore.event_wire import FLUSHED_TIERS
from radix_index.base import LOCAL_TIERS, PrefixIndex
from radix_index.orphans import OrphanRoom
from radix_index.source import SourceFold

_log = logging.getLogger(__name__)

_PROBE_BYTES = 1 << 20
_TIERS = {tier.name.lower(): tier for tier in LOCAL_TIERS}
CachedAs = tuple[str, str | None]  # a model, and an adapter
OnDescribed = Callable[[Instance], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """How instances are probed."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class Fleet:
    """All instances. ``run`` must be running for them to become healthy."""

    def __init__(
        self,
        specs: Iterable[InstanceSpec],
        *,
        client: UpstreamClient,
        index: PrefixIndex,
        rates: Rates,
        options: HealthOptions | None = None,
        on_described: OnDescribed | None = None,
        snapshots: IndexSnapshots | None = None,
        on_began: Callable[[str], object] = lambda name: None,
        on_emptied: Callable[[str], object] = lambda name: None,
    ) -> None:
        """``on_began`` is called with the name of an instance that began anew, with nothing in its caches;
        ``on_emptied`` with that of one that began anew or is out for good."""
        self._on_began, self._on_emptied = on_began, on_emptied
        self._options = options or HealthOptions()
        self.standing = Standing()
        self._serving: dict[str, Sequence[Instance]] = {}  # by model, since the last change
        self._serving_since = 0
        self.instances = {spec.id: Instance(spec, rates, self._options.breaker, self.standing) for spec in specs}
        self._has_outside = any(instance.spec.keeps_out for instance in self.instances.values())
        self.index = index
        self._client = client
        self._on_described = on_described
        self._snapshots = snapshots
        self._rates = rates
        self._orphan_room = OrphanRoom()
        self._cached_as: dict[str, CachedAs] = {}
        self._costs: dict[tuple[str, str], EngineCosts] = {}  # by model and engine
        self._chance = random.Random()  # probes of many gateways should not fall together
        self.regions: dict[str, str] = {}  # of every instance that there was, by name: bills come after it may be gone
        for instance in self.instances.values():
            self._note(instance.spec)
        self.has_parts = any(spec.role is not EngineRole.BOTH for spec in (i.spec for i in self.instances.values()))
        self.warm_at_s = 0.0  # from then on every instance that is up takes its full share (monotonic)
        self._changed = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watch every instance until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for instance in list(self.instances.values()):
                self._begin(group, instance)
            await asyncio.Event().wait()  # there may be none now, and some later

    def add(self, spec: InstanceSpec) -> Instance:
        """Take in one more instance while running. Raises ``ValueError`` for a name that is taken."""
        if spec.id in self.instances:
            raise ValueError(f"there is an instance {spec.id!r} already")
        if self._group is None:
            raise RuntimeError("the fleet is not running")
        instance = self.instances[spec.id] = Instance(spec, self._rates, self._options.breaker, self.standing)
        self.standing.changed()
        self._has_outside |= spec.keeps_out
        self.has_parts = self.has_parts or spec.role is not EngineRole.BOTH
        self._note(spec)
        self._begin(self._group, instance)
        return instance

    def _note(self, spec: InstanceSpec) -> None:
        if spec.region is None:
            self.regions.pop(spec.id, None)
        else:
            self.regions[spec.id] = spec.region

    async def remove(self, name: str) -> None:
        """Take an instance out, with all its ranks: nothing new goes there, what runs there goes on to its end."""
        for each in [other for other in self.instances if other == name or other.startswith(f"{name}{RANK_MARK}")]:
            instance = self.instances.pop(each)
            self.standing.changed()
            instance.is_draining = True
            watch = self._watches.pop(each, None)
            if watch is not None:
                watch.cancel()
                await asyncio.wait({watch})
            self._on_emptied(each)
            _log.info("instance %s (%s) is out", each, instance.spec.url)
        self._changed.set()

    def _begin(self, group: asyncio.TaskGroup, instance: Instance) -> None:
        self._watches[instance.id] = group.create_task(self._watch(instance), name=f"watch {instance.id}")

    def feeds(self) -> list[Feed]:
        """Return what is followed now."""
        return [instance.feed for instance in self.instances.values() if instance.feed is not None]

    def serving(self, model: str) -> Sequence[Instance]:
        """Return the instances that serve the model, healthy or not; see ``gateway.network`` for those outside. The
        same object until something changes. O(1), and O(instances) after a change."""
        if self._serving_since != self.standing.changes:
            self._serving.clear()
            self._serving_since = self.standing.changes
        found = self._serving.get(model)
        if found is None:
            found = self._who_serve(model)
            if found:  # whoever asks for what nobody serves fills no memory
                self._serving[model] = found
        return found

    def _who_serve(self, model: str) -> Sequence[Instance]:
        serving = [instance for instance in self.instances.values() if model in instance.models]
        if self._has_outside:
            inside = [instance for instance in self.instances.values() if not instance.spec.keeps_out]
            if any(not instance.models or model in instance.models for instance in inside):
                return [instance for instance in serving if not instance.spec.keeps_out]
        return serving

    def cached_as(self, model: str) -> CachedAs:
        """Return the model and the adapter under which what is computed for this name is known by engines' events.

        An engine that serves several names has one cache for them, and one for each adapter.
        """
        return self._cached_as.get(model, (model, None))

    def _learn_names(self) -> None:
        """Go by whoever tells what it holds; where two disagree on a name, by the first."""
        found: dict[str, CachedAs] = {}
        for instance in self.instances.values():
            if instance.feed is not None and instance.facts is not None:
                for name in instance.models:
                    adapter = name if name in instance.facts.adapters else None
                    found.setdefault(name, (instance.feed.model, adapter))
        self._cached_as = found

    def retry_after_s(self, model: str) -> int:
        """Return after how many seconds it is worth while to ask for the model again, where nobody serves it now."""
        now_s = time.monotonic()
        return retry_after_s((instance.rest_s(now_s) for instance in self.serving(model)), self._options.interval_s)

    def knows_all_models(self) -> bool:
        """Tell whether every instance has said once what it serves."""
        return all(instance.models for instance in self.instances.values())

    def models(self) -> list[str]:
        """Return every model that an instance serves."""
        return sorted({model for instance in self.instances.values() for model in instance.models})

    def connect_failed(self, instance: Instance, error: ConnectFailed) -> None:
        """A request found nobody there: nothing more goes there until a probe succeeds."""
        self._lost(instance, str(error))
        instance.wake.set()

    def request_answered(self, instance: Instance, ticket: Ticket) -> None:
        """A request that was sent there is being answered."""
        if instance.breaker.succeeded(ticket, time.monotonic()):
            _log.info("instance %s takes requests again", instance.id)
            self._warms_up()

    def request_failed(self, instance: Instance, ticket: Ticket, error: Exception) -> None:
        """A request that was sent there failed: a probe is due now, and after several in a row requests stay away."""
        if instance.breaker.failed(ticket, time.monotonic()):
            _log.warning("instance %s takes no requests for a moment: several failed (%s)", instance.id, error)
        instance.wake.set()

    async def until_ready(self, count: int = 1) -> None:
        """Wait until so many instances take requests."""
        while sum(instance.takes_requests for instance in self.instances.values()) < count:
            self._changed.clear()
            await self._changed.wait()

    async def _watch(self, instance: Instance) -> None:
        while True:
            try:
                await self._live(instance)
            except* UpstreamError as group:
                self._lost(instance, "; ".join(str(error) for error in group.exceptions))
            except* Exception as group:  # the supervisor of one instance: others must not suffer
                _log.exception("watching %s failed; trying again", instance.id, exc_info=group)
                self._lost(instance, "watching it failed")
            finally:
                self._forget(instance)
            await self._pause(instance)

    async def _live(self, instance: Instance) -> None:
        """One life of an instance: returns when nobody is there any more."""
        while not await self._probe(instance):
            await self._pause(instance)
        await self._describe(instance)
        if instance.was_gone:
            instance.was_gone = False
            self._began_anew(instance.id)
        self._found(instance)
        async with asyncio.TaskGroup() as group:
            follows = [group.create_task(self._follow_load(instance), name=f"load {instance.id}")]
            if instance.feed is not None:
                follows += [group.create_task(instance.feed.follow(), name=f"events {instance.id}")]
            while True:
                await self._pause(instance)
                if await self._probe(instance):
                    if instance.is_in_doubt:
                        with contextlib.suppress(UpstreamError):  # then after the next probe
                            await self._ask_facts(instance)
                    self._found(instance)
                elif instance.trouble == _NOBODY:
                    instance.was_gone = True
                    break
            for task in follows:
                task.cancel()

    async def _follow_load(self, instance: Instance) -> None:
        spec, facts = instance.spec, instance.facts
        sources = () if facts is None else facts.load_sources
        signal = instance.capabilities.load
        teller = LoadTeller(spec.adapter, spec.url, spec.headers, signal, sources, spec.rank)
        await follow_load(teller, instance.told_load, self._client, self._options.interval_s)

    async def _pause(self, instance: Instance) -> None:
        try:
            since_s = time.monotonic() - instance.probed_s
            pause_s = until_probe_s(self._options.interval_s, since_s, self._chance, is_there=instance.is_healthy)
            async with asyncio.timeout(pause_s):
                await instance.wake.wait()
        except TimeoutError:
            pass
        instance.wake.clear()

    async def _probe(self, instance: Instance) -> bool:
        spec = instance.spec
        instance.probed_s = time.monotonic()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                response = await self._client.request("GET", f"{spec.url}{spec.adapter.health_path}", spec.headers)
                try:
                    await response.read_all(_PROBE_BYTES)  # to its end, so that the connection is kept
                finally:
                    response.close()
        except (UpstreamError, TimeoutError) as error:
            instance.silent_since_s = instance.silent_since_s or time.monotonic()
            is_nobody = isinstance(error, ConnectFailed)
            self._lost(instance, _NOBODY if is_nobody else f"the probe failed: {type(error).__name__}")
            return False
        instance.silent_since_s = None
        if response.status != 200:
            self._lost(instance, f"the probe was answered {response.status}")
            return False
        return True

    async def _ask_facts(self, instance: Instance) -> InstanceFacts:
        spec = instance.spec
        facts = await spec.adapter.describe(self._client, spec.url, spec.headers)
        instance.is_in_doubt = False
        facts = replace(facts, event_sources=spec.event_sources or facts.event_sources, tiers=spec.tiers or facts.tiers)
        instance.facts = facts
        return facts

    def _doubt(self, instance: Instance) -> None:
        instance.is_in_doubt = True
        instance.wake.set()

    async def _describe(self, instance: Instance) -> None:
        spec, facts = instance.spec, await self._ask_facts(instance)
        if instance.models:  # instances of one kind learn together what prompts and steps take
            kind = instance.models[0], spec.adapter.name
            instance.load.costs = self._costs.setdefault(kind, instance.load.costs)
        if self._on_described is not None:
            await self._on_described(instance)
        pool = spec.pool or facts.pool
        if not instance.models:
            return
        if facts.block_size is None or not facts.event_sources or not spec.follows_events:
            if self._snapshots is not None:
                self._snapshots.disown(spec.id)
            instance.predicted = predicted_residency(
                self.index, spec.id, facts, instance.scores, capacity_tokens=spec.capacity_tokens, pool=pool
            )
            return
        names = [name for name in (*instance.models, *facts.models) if name not in facts.adapters]
        model = (*names, instance.models[0])[0]
        source = self._ranked(instance, facts.event_sources)
        resumed = None if self._snapshots is None else self._snapshots.claim(spec.id, source, model, pool)
        block_size = facts.block_size if resumed is None else resumed.block_size
        fold = SourceFold(
            self.index, spec.id, model=model, block_size=block_size, pool=pool, orphan_room=self._orphan_room
        )
        announced = {_TIERS[name] for name in facts.tiers if name in _TIERS} | set(FLUSHED_TIERS)
        instance.feed = Feed(
            source,
            fold,
            self.index,
            announced_tiers=announced,
            resumed=resumed,
            on_restart=partial(self._began_anew, spec.id),
            on_cleared=partial(self._doubt, instance),
        )
        self._learn_names()

    def _ranked(self, instance: Instance, sources: Sequence[EventSource]) -> EventSource:
        """Return the one source of this instance. Every data-parallel rank has a cache of its own, so each is an
        instance to the router: the one that was configured is rank 0, and its first description adds the others."""
        spec = instance.spec
        if len(sources) > 1 and spec.rank is None:
            for source in sources[1:]:
                self._add_rank(spec, source.rank)
            spec = instance.spec = spec.of_rank(sources[0].rank)
        return next((source for source in sources if source.rank == spec.rank), sources[0])

    def _add_rank(self, spec: InstanceSpec, rank: int) -> None:
        name = f"{spec.id}{RANK_MARK}{rank}"
        if name not in self.instances:
            self.add(replace(spec.of_rank(rank), id=name))

    def _found(self, instance: Instance) -> None:
        if not instance.is_healthy:
            _log.info(
                "instance %s (%s) serves %s", instance.id, instance.spec.url, ", ".join(instance.models) or "nothing"
            )
            instance.breaker.came_up(time.monotonic())
            self._warms_up()
        instance.absence.returned(time.monotonic())
        instance.is_healthy, instance.trouble = True, None
        self._changed.set()

    def _began_anew(self, name: str) -> None:
        self._on_emptied(name)
        self._on_began(name)

    def _warms_up(self) -> None:
        self.warm_at_s = time.monotonic() + self._options.breaker.slow_start_s

    def _lost(self, instance: Instance, why: str) -> None:
        if instance.is_healthy or why != instance.trouble:
            level = logging.WARNING if instance.is_healthy else logging.INFO
            _log.log(level, "instance %s (%s) takes no requests: %s", instance.id, instance.spec.url, why)
        instance.absence.left(time.monotonic())
        instance.is_healthy, instance.trouble = False, why
        self._changed.set()

    def _forget(self, instance: Instance) -> None:
        if instance.feed is None and instance.predicted is None:
            return  # it was never described; what a snapshot said of it may still be proved
        instance.feed = None
        self._learn_names()
        if instance.predicted is not None:
            instance.predicted.restarted()  # what is on its way from there belongs to a former life
            instance.predicted = None
        self.index.remove_instance(instance.id)


_NOBODY = "nobody listens there"
