"""What each instance has of one prompt, and how it stands at this moment: what a decision is made from.

How the instances stand changes seldom, and most have nothing of a prompt: their views are remembered, and a decision
looks at those alone that have some of it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from gateway.breaker import State
from gateway.fleet import Fleet
from gateway.instance import Instance
from gateway.policy.places import Places
from gateway.prompt_job import Prompt
from gateway.routing import NO_HITS, InstanceView, Surroundings, usable_hits
from radix_index.base import Hashes, Knowledge, PrefixIndex

_LOOKS = 4
"""Around so many instances is looked anew in one decision, at most: all of 64 at once would be a long one."""


@dataclass(slots=True)
class _Ground:
    """A model's instances as they stand before any prompt, in the fleet's order, and what that was found from."""

    changes: int
    sizes: Mapping[str, int]
    knowledge: Mapping[str, Knowledge]
    instances: Sequence[Instance]
    views: list[InstanceView]
    by_size: dict[int, tuple[list[int], list[str]]]  # block size → places and names
    unsteady: list[int]  # those whose breakers may let somebody through, or not, as time passes
    looks: list[tuple[float, int]]  # a heap: from when on to look around whom again
    is_warming: bool = False  # somebody had come up lately, so that shares change by the moment


class Survey:
    """Looks at a fleet as one request finds it. O(instances) copies of pointers, and some µs for each that has some of
    the prompt; O(instances) µs after a change."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, places: Places) -> None:
        self._fleet, self._index, self._places = fleet, index, places
        self._grounds: dict[str, _Ground] = {}  # by model, since the fleet's last change

    def block_sizes(self, model: str) -> Set[int]:
        """Return the block sizes for which a prompt of this model must be hashed."""
        return self._ground(model, time.monotonic()).by_size.keys()

    def views(self, model: str, prompt: Prompt | None, tokens: int, now_s: float) -> list[InstanceView]:
        """Return a view of each instance that serves the model, in the fleet's order. What one is expected to have of
        the prompt counts as it can be used; without one nothing is said of exactness."""
        ground = self._ground(model, now_s)
        self._look(ground, now_s)
        views = ground.views.copy()
        if prompt is None:
            return views
        hashes: Mapping[int, Hashes] = prompt.hashes
        for size, (places, names) in ground.by_size.items():
            chain = hashes.get(size)
            if chain is None:
                for at in places:
                    views[at] = msgspec.structs.replace(views[at], exact=False)
                continue
            for row, counts in self._index.match(chain, names).found():
                at = places[row]
                views[at] = _with_hits(views[at], ground.instances[at], chain, size, counts, tokens)
        return views

    def _ground(self, model: str, now_s: float) -> _Ground:
        fleet, index = self._fleet, self._index
        ground = self._grounds.get(model)
        if (
            ground is None
            or ground.changes != fleet.standing.changes
            or ground.sizes is not index.instances()
            or ground.knowledge is not index.knowledge()
        ):
            ground = self._found(model, now_s)
        return ground

    def _look(self, ground: _Ground, now_s: float) -> None:
        """Look again where things change by themselves."""
        is_warming = now_s < self._fleet.warm_at_s
        held_back = _held_back(ground.instances, now_s) if is_warming else ()
        asked = range(len(ground.instances)) if is_warming or ground.is_warming else ground.unsteady
        ground.is_warming = is_warming
        for at in asked:
            view, instance = ground.views[at], ground.instances[at]
            is_healthy = instance.takes_requests and instance not in held_back
            if view.healthy != is_healthy:
                ground.views[at] = msgspec.structs.replace(view, healthy=is_healthy)
        for _ in range(_LOOKS):
            if not ground.looks or now_s < ground.looks[0][0]:
                break
            at = ground.looks[0][1]
            around = self._around(ground.instances[at], now_s)
            ground.views[at] = msgspec.structs.replace(ground.views[at], around=around)
            heapq.heapreplace(ground.looks, (self._look_again_s(ground.instances[at]), at))

    def _found(self, model: str, now_s: float) -> _Ground:
        """Look at every instance, and remember what was found."""
        changes = self._fleet.standing.changes
        if any(ground.changes != changes for ground in self._grounds.values()):
            self._grounds.clear()
        instances, sizes, knowledge = self._fleet.serving(model), self._index.instances(), self._index.knowledge()
        views, by_size = list[InstanceView](), dict[int, tuple[list[int], list[str]]]()
        for at, instance in enumerate(instances):
            name, size = instance.id, sizes.get(instance.id)
            if size is not None:
                places, names = by_size.setdefault(size, ([], []))
                places.append(at)
                names.append(name)
            place = self._places.known.get(name)
            around = place.around if place is not None else None
            views.append(
                InstanceView(
                    name,
                    NO_HITS,
                    instance.load,
                    around or self._around(instance, now_s),
                    instance.takes_requests,
                    knowledge.get(name) is Knowledge.COMPLETE,
                )
            )
        unsteady = [at for at, instance in enumerate(instances) if instance.breaker.state is not State.CLOSED]
        looks = [(self._look_again_s(instance), at) for at, instance in enumerate(instances)]
        heapq.heapify(looks)
        ground = _Ground(changes, sizes, knowledge, instances, views, by_size, unsteady, looks)
        if instances:
            self._grounds[model] = ground
        return ground

    def _around(self, instance: Instance, now_s: float) -> Surroundings:
        facts = instance.facts
        capacity = instance.spec.capacity_tokens or (None if facts is None else facts.capacity_tokens)
        return self._places.around(instance.id, instance.load, capacity, now_s)

    def _look_again_s(self, instance: Instance) -> float:
        return self._places.place(instance.id).look_again_s


def _with_hits(
    plain: InstanceView, instance: Instance, hashes: Hashes, size: int, counts: Sequence[int], tokens: int
) -> InstanceView:
    """Return the view of an instance that has some of the prompt, or will have it soon."""
    device, host, disk, pool, coming = counts
    hits, matched, pending = NO_HITS, device + host + disk + pool, 0
    if matched:
        if instance.predicted is not None:
            device += instance.predicted.tail_blocks(hashes, matched)
        hits = usable_hits((device, host, disk, pool), size, tokens)
        if instance.tier_use.refuses:
            hits = instance.tier_use.taken(hits)
    if coming:
        pending = min(coming * size, max((tokens - 1) // size * size - sum(hits), 0))
    return InstanceView(plain.instance, hits, plain.load, plain.around, plain.healthy, plain.exact, pending, matched)


def _held_back(instances: Sequence[Instance], now_s: float) -> Sequence[Instance]:
    """Return those that came up lately and have their share of requests already, while others take some."""
    shares = [instance.breaker.share(now_s) for instance in instances]
    steady = [i.load.running for i, share in zip(instances, shares, strict=True) if share == 1 and i.takes_requests]
    if not steady:
        return ()
    most = max(steady)
    return [i for i, share in zip(instances, shares, strict=True) if share < 1 and i.load.running > share * most]
