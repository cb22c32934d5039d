"""What is remembered of the instances between decisions is what is found by looking at each anew, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.base import InstanceFacts
from engine_adapter.sglang import Sglang
from gateway.breaker import BreakerOptions
from gateway.fleet import Fleet, HealthOptions
from gateway.instance import InstanceSpec
from gateway.policy.places import Places
from gateway.prompt_job import Prompt
from gateway.routing import NO_HITS, Rates
from gateway.survey import Survey
from kvstore.page import Tier
from radix_index.base import HashArray, Knowledge
from radix_index.index import RadixIndex

MODEL, COUNT, NO_WARM_UP = "m", 6, BreakerOptions(failures=1, period_s=60.0, slow_start_s=0.0)
CHAIN: HashArray = np.arange(1, 9, dtype=np.uint64)
SIZES = (16, 16, 16, 32, 32, 16)


@dataclass
class Site:
    """Some instances with two block sizes, and what looks at them."""

    fleet: Fleet
    index: RadixIndex
    places: Places
    survey: Survey

    @property
    def ids(self) -> list[str]:
        """The instances' names."""
        return list(self.fleet.instances)


def site(breaker: BreakerOptions = NO_WARM_UP, count: int = COUNT) -> Site:
    index, places = RadixIndex(), Places()
    specs = [InstanceSpec(f"i{n}", "http://127.0.0.1:1", Sglang(), models=(MODEL,)) for n in range(count)]
    fleet = Fleet(
        specs,
        client=None,  # type: ignore[arg-type]  # nobody is asked
        index=index,
        rates=Rates(1e4, 1e6, 1e5, 1e5),
        options=HealthOptions(breaker=breaker),
    )
    for n, instance in enumerate(fleet.instances.values()):
        instance.facts = InstanceFacts(models=(MODEL,), block_size=SIZES[n % COUNT])
        instance.is_healthy = True
        index.add_instance(instance.id, block_size=SIZES[n % COUNT])
    return Site(fleet, index, places, Survey(fleet, index, places))


def prompt(sizes: Sequence[int] = (16, 32), tokens: int = 130) -> Prompt:
    return Prompt(tokens, {size: CHAIN[: tokens // size] for size in sizes})


def looked_at(at: Site, asked: Prompt | None) -> list[tuple[object, ...]]:
    """Look at every instance, by what each says of itself."""
    found = list[tuple[object, ...]]()
    for instance in at.fleet.instances.values():
        if MODEL not in instance.models:
            continue
        size = at.index.instances().get(instance.id)
        chain = asked.hashes.get(size) if asked is not None and size is not None else None
        hits, is_exact = NO_HITS, at.index.knowledge().get(instance.id) is Knowledge.COMPLETE
        if asked is not None and chain is None:
            is_exact = False
        if chain is not None and size is not None and asked is not None:
            device = min(at.index.match(chain, [instance.id])[instance.id].tier_blocks[0], (asked.tokens - 1) // size)
            hits = (device * size, 0, 0, 0)
        found.append((instance.id, hits, instance.load, instance.takes_requests, is_exact))
    return found


def seen(at: Site, asked: Prompt | None) -> list[tuple[object, ...]]:
    views = at.survey.views(MODEL, asked, asked.tokens if asked is not None else 100, time.monotonic())
    return [(view.instance, view.hit_tokens, view.load, view.healthy, view.exact) for view in views]


Change = tuple[str, int, bool]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["health", "drain", "break", "mend", "stale", "store", "drop", "resize", "models", "leave", "come"]
        ),
        st.integers(0, COUNT - 1),
        st.booleans(),
    ),
    max_size=12,
)


def change(at: Site, what: Change) -> None:
    kind, number, is_so = what
    name = f"i{number}"
    instance = at.fleet.instances.get(name)
    if kind == "come" and instance is None:
        at.fleet._group = _NoGroup()  # type: ignore[assignment]
        at.fleet.add(InstanceSpec(name, "http://127.0.0.1:1", Sglang(), models=(MODEL,))).is_healthy = is_so
    if instance is None:
        return
    match kind:
        case "health":
            instance.is_healthy = is_so
        case "drain":
            instance.is_draining = is_so
        case "break":
            instance.breaker.failed(instance.breaker.begin(0.0), 0.0 if is_so else time.monotonic())
        case "mend":
            instance.breaker.came_up(0.0)
        case "stale" if name in at.index.instances():
            at.index.set_knowledge(name, Knowledge.STALE if is_so else Knowledge.COMPLETE)
        case "store" if name in at.index.instances():
            at.index.stored(name, Tier.DEVICE, CHAIN[: number + 1])
        case "drop":
            at.index.remove_instance(name)
        case "resize":
            at.index.add_instance(name, block_size=32 if is_so else 16)
        case "models":
            spec = instance.spec
            instance.spec = InstanceSpec(spec.id, spec.url, spec.adapter)
            instance.facts = InstanceFacts(models=(MODEL,) if is_so else ("other",))
        case "leave":
            del at.fleet.instances[name]
            at.fleet.standing.changed()


class _NoGroup:
    """Takes what would watch an instance, and lets nobody do so."""

    def create_task(self, watch: object, name: str) -> object:
        watch.close()  # type: ignore[attr-defined]
        return watch


@settings(max_examples=150, deadline=None)
@given(CHANGES, st.sampled_from([(16, 32), (16,), ()]), st.integers(1, 200))
def test_views_are_what_each_instance_says_whatever_happened(
    changes: list[Change], sizes: tuple[int, ...], tokens: int
) -> None:
    at = site()
    for what in changes:
        assert seen(at, asked := prompt(sizes, min(tokens, 130))) == looked_at(at, asked)
        change(at, what)
        assert at.survey.block_sizes(MODEL) == {
            at.index.instances()[instance.id]
            for instance in at.fleet.serving(MODEL)
            if instance.id in at.index.instances()
        }
    asked = prompt(sizes, min(tokens, 130))
    assert seen(at, asked) == looked_at(at, asked)


def test_instances_that_stand_as_they_stood_are_not_looked_at_again() -> None:
    at = site()
    first, second = (at.survey.views(MODEL, None, 100, 1.0) for _ in range(2))
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert first is not second  # whoever got the one may change it


def test_all_are_looked_around_in_turn_and_few_in_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    at, looked = site(count=12), list[str]()
    now_s = time.monotonic()
    at.survey.views(MODEL, None, 100, now_s)
    around = at.places.around

    def noted(instance: str, *rest: object) -> object:
        looked.append(instance)
        return around(instance, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(at.places, "around", noted)
    at.survey.views(MODEL, None, 100, now_s)
    assert not looked
    for step in range(1, 4):  # rare requests: everybody's time has come at each of them
        at.survey.views(MODEL, None, 100, now_s + 10.0 * step)
        assert len(looked) == 4 * step
    assert sorted(looked) == sorted(at.ids)


def test_a_tripped_breaker_lets_one_through_when_its_time_has_come() -> None:
    at = site(BreakerOptions(failures=1, period_s=0.0, slow_start_s=0.0))
    breaker = at.fleet.instances["i0"].breaker
    breaker.failed(breaker.begin(time.monotonic()), time.monotonic() + 3600)
    assert not at.survey.views(MODEL, None, 100, time.monotonic())[0].healthy
    breaker._retry_s = time.monotonic()
    assert at.survey.views(MODEL, None, 100, time.monotonic())[0].healthy
    breaker.begin(time.monotonic())  # the trial runs
    assert not at.survey.views(MODEL, None, 100, time.monotonic())[0].healthy


def test_who_came_up_lately_is_held_back_until_it_is_warm() -> None:
    at = site(BreakerOptions(slow_start_s=3600.0))
    now_s = time.monotonic()
    new, old = at.fleet.instances["i0"], at.fleet.instances["i1"]
    old.load.reserve(100, 100, now_s)
    new.breaker.came_up(now_s)
    at.fleet.warm_at_s = now_s + 3600.0
    assert at.survey.views(MODEL, None, 100, now_s)[0].healthy
    new.load.reserve(100, 100, now_s)
    assert not at.survey.views(MODEL, None, 100, now_s)[0].healthy
    assert at.survey.views(MODEL, None, 100, now_s + 7200.0)[0].healthy
