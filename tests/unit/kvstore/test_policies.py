"""Every eviction policy by the rules that all keep, then each by what is its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policies.arc import Arc
from kvstore.policies.learned_reuse import LearnedReuse
from kvstore.policies.lfu import AgingLfu
from kvstore.policies.named import POLICIES
from kvstore.policies.s3_fifo import S3Fifo
from kvstore.policy import EvictionPolicy, PrefixLru

Policy = EvictionPolicy[str]
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def arrive(policy: EvictionPolicy, key: object, parent: object = None) -> None:
    policy.add(key, parent)
    policy.rest(key)


def want(policy: EvictionPolicy, *keys: object) -> None:
    for key in keys:
        policy.use(key)
        policy.rest(key)


def evict(policy: EvictionPolicy, count: int = 1_000_000) -> list[object]:
    gone = []
    while len(gone) < count and (victim := policy.victim()) is not None:
        policy.discard(victim)
        gone.append(victim)
    return gone


@every_policy
def test_a_chain_goes_from_its_end_and_a_branch_point_after_its_branches(make: Callable[[], Policy]) -> None:
    policy = make()
    for key, parent in [("a", None), ("b", "a"), ("c", "b"), ("d", "b")]:
        arrive(policy, key, parent)
    want(policy, "d", "c")
    gone = evict(policy)
    assert sorted(gone[:2]) == ["c", "d"]
    assert gone[2:] == ["b", "a"]
    assert len(policy) == 0


@every_policy
def test_what_is_in_use_is_no_victim_and_held_pages_come_back(make: Callable[[], Policy]) -> None:
    policy = make()
    arrive(policy, "a")
    policy.add("b", None)
    policy.hold("a")
    assert (len(policy), policy.victim()) == (0, None)
    policy.rest("a")
    assert evict(policy) == ["a"]
    policy.rest("b")
    assert evict(policy) == ["b"]


@every_policy
def test_what_has_had_its_run_goes_first(make: Callable[[], Policy]) -> None:
    policy = make()
    for key in "abcdef":
        arrive(policy, key)
    want(policy, "e", "e", "e")
    policy.use("f")
    policy.retire("f")  # in use: its user may still want it
    policy.retire("e")
    policy.rest("f")
    assert evict(policy, 1) == ["e"]
    assert sorted(map(str, evict(policy))) == ["a", "b", "c", "d", "f"]


@every_policy
@given(data=st.data())
def test_any_order_of_events_keeps_the_accounts(make: Callable[[], Policy], data: st.DataObject) -> None:
    policy = make()
    parent_of = {key: None if key % 4 == 0 else key - 1 for key in range(12)}
    using: dict[int, bool] = {}
    for step in data.draw(st.lists(st.tuples(st.sampled_from("aurthve"), st.integers(0, 11)), max_size=60)):
        act, key = step
        if act == "a" and key not in using:
            policy.add(key, parent_of[key])
            using[key] = True
        elif act in "uh" and key in using:
            (policy.use if act == "u" else policy.hold)(key)
            using[key] = True
        elif act == "r" and using.get(key):
            policy.rest(key)
            using[key] = False
        elif act == "t" and key in using:
            policy.retire(key)
        elif act == "v" and key in using:
            policy.discard(key)
            del using[key]
        elif act == "e":
            victim = policy.victim()
            resting = {k for k, busy in using.items() if not busy}
            assert (victim is None) == (not resting)
            if victim is not None:
                assert victim in resting
                bare = {k for k in resting if not any(parent_of[other] == k for other in using)}
                assert victim in (bare or resting)
                policy.discard(victim)
                del using[victim]
        assert len(policy) == sum(not busy for busy in using.values())


def scan_hits(policy: EvictionPolicy, references: list[int], capacity: int) -> int:
    present: set[int] = set()
    hits = 0
    for key in references:
        if key in present:
            hits += 1
            want(policy, key)
            continue
        if len(present) == capacity:
            present.difference_update(evict(policy, 1))
        arrive(policy, key)
        present.add(key)
    return hits


def with_scans(rng: random.Random) -> list[int]:
    """A hot set, between runs of pages that nobody wants again."""
    return [key for i in range(60) for key in [*rng.choices(range(30), k=50), *range(1000 + 60 * i, 1060 + 60 * i)]]


@pytest.mark.parametrize("make", [Arc, S3Fifo, AgingLfu, LearnedReuse])
def test_a_scan_does_not_flush_what_is_wanted_again(make: Callable[[], EvictionPolicy]) -> None:
    references = with_scans(random.Random(1))
    assert scan_hits(make(), references, 40) > 1.2 * scan_hits(PrefixLru(), references, 40)


def test_learned_reuse_keeps_what_comes_back_late_over_what_never_does() -> None:
    """A third of the pages is wanted again after 90 others came, the rest never. LRU of 60 gets nothing."""
    references = []
    for i in range(4000):
        references.append(i if i % 3 == 0 else 100_000 + i)
        if i >= 90 and i % 3 == 0:
            references.append(i - 90)
    assert scan_hits(PrefixLru(), references, 60) == 0
    assert scan_hits(LearnedReuse(), references, 60) > 300


def test_lfu_lets_the_fame_of_long_ago_fade() -> None:
    policy: AgingLfu[str] = AgingLfu()
    arrive(policy, "famous")
    want(policy, *["famous"] * 3)
    for i in range(40):
        arrive(policy, f"new {i}")
        want(policy, f"new {i}")
        if evict(policy, 1) == ["famous"]:
            break
    else:
        pytest.fail("it stayed for ever")
