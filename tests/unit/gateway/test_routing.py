"""The policy, on values alone."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.routing import (
    ExpectedTtft,
    FewestRequests,
    InstanceView,
    Load,
    Rates,
    RoundRobin,
    decide,
    usable_hits,
)

_RATES = Rates(prefill=1000.0, host=100_000.0, disk=10_000.0, pool=5_000.0)


def _view(
    instance: str, hits: tuple[int, int, int, int] = (0, 0, 0, 0), queued: int = 0, **more: object
) -> InstanceView:
    return InstanceView(instance, hits, queued, **{"running": 0, "rates": _RATES, **more})  # type: ignore[arg-type]


def _chosen(*views: InstanceView, prompt: int = 4000) -> str | None:
    decision = decide(views, prompt, ExpectedTtft(), random.Random(0))
    return decision and decision.instance


def test_the_warm_instance_wins_while_waiting_costs_less_than_computing() -> None:
    warm = _view("warm", (3200, 0, 0, 0))
    assert _chosen(warm, _view("cold")) == "warm"
    assert _chosen(structs.replace(warm, queued_tokens=3000), _view("cold")) == "warm"
    assert _chosen(structs.replace(warm, queued_tokens=3400), _view("cold")) == "cold"


def test_a_faster_tier_wins_and_a_slow_one_still_beats_computing() -> None:
    device, host, pool = (
        _view("device", (3200, 0, 0, 0)),
        _view("host", (0, 3200, 0, 0)),
        _view("pool", (0, 0, 0, 3200)),
    )
    assert _chosen(pool, host, device) == "device"
    assert _chosen(pool, host) == "host"
    assert _chosen(pool, _view("cold")) == "pool"
    slow = structs.replace(pool, rates=replace(_RATES, pool=500.0))
    assert _chosen(slow, _view("cold")) == "cold"


def test_sick_and_excluded_instances_are_shown_and_not_chosen() -> None:
    views = [_view("sick", (3200, 0, 0, 0), healthy=False), _view("tried", (1600, 0, 0, 0)), _view("left")]
    decision = decide(views, 4000, ExpectedTtft(), random.Random(0), without=frozenset({"tried"}))
    assert decision is not None
    assert decision.instance == "left"
    assert [(c.instance, c.healthy) for c in decision.candidates] == [("sick", False), ("tried", True), ("left", True)]
    assert decide(views[:1], 4000, ExpectedTtft(), random.Random(0)) is None


def test_ties_are_shared_and_follow_the_seed() -> None:
    def run(seed: int) -> list[str]:
        chance = random.Random(seed)
        views = [_view("a"), _view("b"), _view("c")]
        return [d.instance for _ in range(300) if (d := decide(views, 10, ExpectedTtft(), chance))]

    assert run(1) == run(1) != run(2)
    assert min(Counter(run(1)).values()) > 60


def test_a_decision_is_exact_only_for_hashed_prompts_on_whole_feeds() -> None:
    for hashed, exact in ((True, True), (True, False), (False, True)):
        decision = decide([_view("a", exact=exact)], 10, ExpectedTtft(), random.Random(0), hashed=hashed)
        assert decision is not None
        assert decision.exact == (hashed and exact)


def test_the_other_policies() -> None:
    views = [_view("a", running=2), _view("b", running=1), _view("c", running=3)]
    few = decide(views, 10, FewestRequests(), random.Random(0))
    assert few is not None
    assert few.instance == "b"
    turn, chance = RoundRobin(), random.Random(0)
    assert [d.instance for _ in range(5) if (d := decide(views, 10, turn, chance))] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("blocks", "prompt", "hits"),
    [
        ((4, 0, 0, 0), 65, (64, 0, 0, 0)),
        ((4, 0, 0, 0), 64, (48, 0, 0, 0)),
        ((2, 1, 0, 1), 64, (32, 16, 0, 0)),
        ((0, 0, 0, 0), 0, (0, 0, 0, 0)),
    ],
)
def test_the_last_prompt_token_is_never_a_hit(
    blocks: tuple[int, ...], prompt: int, hits: tuple[int, int, int, int]
) -> None:
    assert usable_hits(blocks, 16, prompt) == hits


@given(st.lists(st.tuples(st.integers(0, 5000), st.lists(st.sampled_from(["answered", "release"]), max_size=5))))
def test_a_load_is_zero_again_however_reservations_end(steps: list[tuple[int, list[str]]]) -> None:
    load = Load()
    reservations = [(load.reserve(tokens), calls) for tokens, calls in steps]
    assert load.queued_tokens == sum(tokens for tokens, _ in steps)
    assert load.running == len(steps)
    for reservation, calls in reservations:
        for call in calls:
            getattr(reservation, call)()
        reservation.release()
    assert (load.queued_tokens, load.running) == (0, 0)


def test_rates_follow_what_is_observed_and_ignore_what_says_nothing() -> None:
    rates = _RATES
    assert rates.learned(10, 5.0) is rates
    assert rates.learned(1000, 0.0) is rates
    for _ in range(60):
        rates = rates.learned(1000, 4.0)
    assert rates.prefill == pytest.approx(250, rel=0.01)


def test_what_is_on_its_way_counts_as_there_and_its_queue_is_waited_for() -> None:
    """A second request on a cold prefix joins the first while its queue costs less than computing it elsewhere."""
    joined = structs.replace(_view("a", queued=1000), pending_tokens=960)
    assert joined.expected_ttft_s(1000) == pytest.approx(1040 / _RATES.prefill)
    decision = decide([joined, _view("b", queued=100)], 1000, ExpectedTtft(), random.Random(0))
    assert decision is not None
    assert (decision.instance, decision.predicted_hit_tokens) == ("a", 0), "what is on its way is not claimed"
    busier = structs.replace(joined, queued_tokens=1200)
    decision = decide([busier, _view("b", queued=100)], 1000, ExpectedTtft(), random.Random(0))
    assert decision is not None
    assert (decision.instance, decision.predicted_hit_tokens) == ("b", 0)
