"""Eviction order, without pages, tiers or bytes."""

from __future__ import annotations

from kvstore.policy import PrefixLru


def order(policy: PrefixLru[str]) -> str:
    """Evict everything that rests."""
    gone = ""
    while (victim := policy.victim()) is not None:
        policy.discard(victim)
        gone += victim
    return gone


def arrive(policy: PrefixLru[str], key: str, parent: str | None = None) -> None:
    policy.add(key, parent)
    policy.rest(key)


def test_the_least_recently_used_goes_first() -> None:
    policy: PrefixLru[str] = PrefixLru()
    for key in "abc":
        arrive(policy, key)
    policy.use("a")
    policy.rest("a")
    assert len(policy) == 3
    assert order(policy) == "bca"


def test_what_is_in_use_is_no_victim() -> None:
    policy: PrefixLru[str] = PrefixLru()
    arrive(policy, "a")
    policy.add("b", None)
    policy.use("a")
    assert (len(policy), policy.victim()) == (0, None)


def test_a_chain_goes_from_its_end_however_old_its_head() -> None:
    policy: PrefixLru[str] = PrefixLru()
    for key, parent in [("a", None), ("b", "a"), ("c", "b"), ("x", None)]:
        arrive(policy, key, parent)
    assert order(policy) == "cbax"


def test_a_branch_point_waits_for_all_its_branches() -> None:
    policy: PrefixLru[str] = PrefixLru()
    for key, parent in [("p", None), ("l", "p"), ("r", "p")]:
        arrive(policy, key, parent)
    assert order(policy) == "lrp"


def test_a_prefix_with_a_successor_in_use_is_the_last_resort() -> None:
    policy: PrefixLru[str] = PrefixLru()
    arrive(policy, "p")
    policy.add("s", "p")
    arrive(policy, "x")
    assert order(policy) == "xp"


def test_a_successor_may_arrive_before_its_prefix() -> None:
    policy: PrefixLru[str] = PrefixLru()
    arrive(policy, "s", "p")
    arrive(policy, "p")
    assert order(policy) == "sp"


def test_a_page_that_stepped_aside_and_was_used_again_is_recent() -> None:
    policy: PrefixLru[str] = PrefixLru()
    arrive(policy, "p")
    arrive(policy, "s", "p")
    assert policy.victim() == "s"  # p has stepped aside
    policy.use("p")
    arrive(policy, "x")
    policy.rest("p")
    assert order(policy) == "sxp"
    assert len(policy) == 0
