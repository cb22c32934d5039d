"""What is learned from answers: costs net of waiting, output lengths, and whether idle runs come back."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.costs import EngineCosts, Fetch, Rates
from gateway.policy.fit import LinearFit
from gateway.policy.load import Load
from gateway.policy.outputs import OutputLengths
from gateway.policy.places import Places
from gateway.policy.reuse import Frontier, ReuseOdds
from kvstore.page import Tier

_RATES = Rates(prefill=2000.0, host=1e5, disk=1e4, pool=5e3)
_CALLS = st.lists(st.sampled_from(["answered", "release", "counted"]), max_size=5)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 500), st.floats(0, 100), _CALLS), max_size=30))
def test_a_load_is_zero_again_however_reservations_end(steps: list[tuple[int, int, float, list[str]]]) -> None:
    load, now_s = Load(EngineCosts(_RATES)), 0.0
    reservations = []
    for new, context, later_s, calls in steps:
        now_s += later_s
        reservations.append((load.reserve(new + context, new, now_s, 20.0), calls))
        load.check()
    assert load.queued_tokens == sum(new for new, *_ in steps)
    assert load.running == len(steps)
    for reservation, calls in reservations:
        for call in calls:
            now_s += 0.5
            getattr(reservation, call)(*((7,) if call == "counted" else (now_s,)))
            load.check()
            assert load.backlog_s(now_s) >= 0
        reservation.release(now_s)
        load.check()
    assert (load.queued_tokens, load.running, load.backlog_s(now_s)) == (0, 0, 0.0)


def test_a_prompts_cost_is_learned_without_its_wait() -> None:
    """Three requests at once on an engine five times as fast as believed: the last waits for two, and teaches alike."""
    load, now_s, chance = Load(EngineCosts(_RATES)), 0.0, random.Random(1)
    for _ in range(60):
        sizes = [chance.randrange(500, 20_000) for _ in range(3)]
        waiting = [load.reserve(size, size, now_s) for size in sizes]
        for size, reservation in zip(sizes, waiting, strict=True):
            now_s += 0.02 + size / 10_000
            reservation.answered(now_s)
            reservation.release(now_s)
        now_s += 1.0
    assert load.costs.prompt_s(10_000, 0) == pytest.approx(1.02, rel=0.03)
    assert load.costs.learned().prefill == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("slow", [1, 4])
def test_one_that_is_slow_has_its_own_pace_and_all_that_are_cost_more(slow: int) -> None:
    """Of four; stalls in the beginning make each look ten times as slow as it is."""
    costs, chance = EngineCosts(_RATES), random.Random(6)
    loads = [Load(costs) for _ in range(4)]
    for at in range(3000):
        new, number = chance.randrange(500, 20_000), chance.randrange(4)
        loads[number].took(new, 0, 0.0, new / 2000 * (20.0 if at < 100 else 2.0 if number < slow else 1.0))
    assert [load.slowness for load in loads] == pytest.approx([2.0 if slow == 1 else 1.0, 1.0, 1.0, 1.0], rel=0.35)
    for number, load in enumerate(loads):
        assert load.prompt_s(10_000, 0) == pytest.approx(10.0 if number < slow else 5.0, rel=0.15)
    assert costs.prompt_s(10_000, 0) == pytest.approx(5.0 if slow == 1 else 10.0, rel=0.15)


def test_the_price_of_context_and_of_decodes_beside_is_told_from_that_of_tokens() -> None:
    costs, chance = EngineCosts(_RATES), random.Random(2)
    for _ in range(400):
        new, context, beside = chance.randrange(64, 8000), chance.randrange(100_000), chance.randrange(200_000)
        took = 0.015 + new * (5e-5 + 8e-10 * (context + new / 2) + 2e-10 * beside)
        costs.learn_prompt(new, context, beside, took * chance.uniform(0.95, 1.05))
    for new, context, beside in ((1000, 0, 0), (1000, 100_000, 0), (8000, 0, 200_000)):
        true = 0.015 + new * (5e-5 + 8e-10 * (context + new / 2) + 2e-10 * beside)
        assert costs.prompt_s(new, context, beside) == pytest.approx(true, rel=0.05)


def test_one_stalled_answer_teaches_little_and_a_new_speed_is_soon_known() -> None:
    costs = EngineCosts(_RATES)
    for _ in range(50):
        costs.learn_prompt(4000, 0, 0.0, 2.0)
    costs.learn_prompt(4000, 0, 0.0, 500.0)
    assert costs.prompt_s(4000, 0) == pytest.approx(2.0, rel=0.1)
    for _ in range(200):
        costs.learn_prompt(4000, 0, 0.0, 4.0)
    assert costs.prompt_s(4000, 0) == pytest.approx(4.0, rel=0.15)


def test_decode_steps_and_fetches_are_learned() -> None:
    costs, chance = EngineCosts(_RATES), random.Random(3)
    for _ in range(400):
        context, share = chance.uniform(0, 1e6), chance.random()
        costs.learn_step(context, share, 0.012 + 2e-8 * context + 0.05 * share)
    assert costs.step_s(5e5) == pytest.approx(0.022, rel=0.05)
    assert costs.stall_share == pytest.approx(0.05 / 0.062, rel=0.1)
    for _ in range(60):
        costs.learn_fetch(Fetch(pool=10_000), 0.5)
    assert costs.fetch_s(Fetch(pool=20_000)) == pytest.approx(1.0, rel=0.02)
    assert costs.fetch_s(Fetch(host=1000)) == pytest.approx(0.01)


def test_an_answer_that_shows_no_first_token_does_not_block_the_queue_for_ever() -> None:
    load = Load(EngineCosts(_RATES))
    load.reserve(2000, 2000, 0.0)
    assert load.backlog_s(0.5) == pytest.approx(0.51, abs=0.01)
    assert 0 < load.backlog_s(2.0) < 0.5
    assert load.backlog_s(60.0) == 0.0


def test_who_fetches_holds_up_nobody() -> None:
    """A fetch of two seconds is under way, and one waits for the link; two prompts of half a second come after them."""
    load = Load(EngineCosts(_RATES))
    fetching = load.reserve(10_000, 0, 0.0, fetch=(0, 0, 10_000, 0))
    assert load.backlog_s(1.0) == 0, "nobody computes yet"
    second = load.reserve(5000, 0, 1.0, fetch=(0, 0, 5000, 0))
    assert (fetching.ready_s, second.ready_s) == pytest.approx((2.0, 3.0))
    prompts = [load.reserve(980, 980, 1.0) for _ in range(2)]
    assert load.backlog_s(1.0) == pytest.approx(1.0, abs=0.02)
    for at, prompt in enumerate(prompts):
        prompt.answered(1.5 + 0.5 * at)
    fetching.answered(2.01)
    assert load.backlog_s(2.5) == 0
    second.answered(3.01)
    load.check()


def test_who_comes_while_another_fetches_holds_that_up_or_waits_for_it() -> None:
    """A prompt of half a second has its pages in a second."""
    load = Load(EngineCosts(_RATES))
    other = load.reserve(6000, 1000, 0.0, fetch=(0, 0, 5000, 0))
    assert (other.ready_s, load.backlog_s(0.0)) == (pytest.approx(1.0), 0.0)
    assert load.turn(0.0, 0.0, 0.0, 0.3) == (0.0, 0.0)  # done before
    assert load.turn(0.0, 0.0, 0.0, 4.0) == pytest.approx((0.0, 3.0))
    assert load.turn(0.0, 0.0, 1.2, 4.0) == pytest.approx((1.0 + other.prompt_s, 0.0))  # its own pages come later


def test_fetches_are_learned_where_they_waited_for_nothing() -> None:
    """The link is twice as fast as believed; every other fetch waits for the one before it."""
    load, now_s = Load(EngineCosts(_RATES)), 0.0
    for _ in range(60):
        first, second = (load.reserve(10_000, 1, now_s, fetch=(0, 0, 9999, 0)) for _ in range(2))
        first.answered(now_s + 1.01)
        second.answered(now_s + 2.01)
        for reservation in (first, second):
            reservation.release(now_s + 3.0)
        now_s += 10.0
    assert load.costs.fetch_s(Fetch(pool=10_000)) == pytest.approx(1.0, rel=0.02)


def test_a_fit_never_leaves_the_finite() -> None:
    fit, chance = LinearFit((0.1, 0.0), (0.1, 1.0)), random.Random(4)
    for _ in range(5000):
        fit.learn((1.0, chance.choice((0.0, 1e-6, 1e6))), chance.choice((1e-6, 1.0, 1e4)))
        assert all(math.isfinite(weight) for weight in fit.weights)


def test_two_terms_that_go_together_do_not_drive_each_other_away() -> None:
    """Full engines show hardly any context but one: what a step costs beside it and with it cannot be told apart."""
    costs, chance = EngineCosts(_RATES), random.Random(5)
    for at in range(12_000):
        context = chance.uniform(0, 400_000) if at < 2000 else chance.uniform(340_000, 370_000)
        share = chance.uniform(0.5, 1.0)
        costs.learn_step(context, share, (0.009 + context * 6e-8 + share * 0.01) * chance.uniform(0.8, 1.2))
        if at > 2000:
            assert costs.step_s(355_000, 0.75) == pytest.approx(0.038, rel=0.3)


@pytest.mark.parametrize("seconds", [0.001, 0.02, 5.0])
def test_what_was_seen_once_is_believed_and_a_prefix_stays_worth_going_to(seconds: float) -> None:
    """Also where a prompt took less than an empty one was believed to: its tokens take next to nothing, not nothing."""
    costs = EngineCosts(_RATES)
    costs.learn_prompt(6000, 0, 0.0, seconds)
    assert costs.prompt_s(6000, 0) == pytest.approx(seconds, rel=0.1, abs=6000 / _RATES.prefill / 500)
    assert costs.prompt_s(6000, 0) > costs.prompt_s(0, 6000) + 0.001


def test_lengths_of_answers_are_known_by_run_and_drawn_to_the_mean() -> None:
    outputs = OutputLengths(overall=300.0)
    assert outputs.expected("a") == 300
    for _ in range(30):
        outputs.seen("a", 2000)
        outputs.seen("b", 20)
    assert outputs.expected("a") > 1200 > 200 > outputs.expected("b")


def test_odds_fall_with_age_and_tell_when_a_step_is_due() -> None:
    odds = ReuseOdds()
    assert odds.after(math.inf) == 0
    for number in range(400):
        odds.ended()
        if number % 4:
            odds.came_back(3.0 if number % 2 else 100.0)
    assert 0.6 < odds.after(0.0) < 0.9
    assert odds.after(0.0) > odds.after(30.0) > odds.after(300.0)
    assert odds.within(0.0, 10.0) == pytest.approx(0.5, abs=0.05)
    assert odds.within(30.0, 10.0) < 0.1
    assert odds.further_steps() == pytest.approx(3.0, rel=0.1)


def test_the_frontier_is_the_age_of_what_goes_now() -> None:
    """Ten are on the device, one step a second; ten more behind it, then it is nowhere."""
    frontier, last = Frontier(), 0

    def tier_of(block: int) -> int | None:
        age = last - block
        return Tier.DEVICE if age < 10 else Tier.HOST if age < 20 else None

    for last in range(60):
        frontier.used(f"run-{last}", last, float(last), tier_of)
        if last < 10:
            assert frontier.ages_s[Tier.DEVICE] == math.inf, "nothing was given up yet"
        if last < 20:
            assert frontier.ages_s[Tier.HOST] == math.inf
    device_s, host_s, disk_s, pool_s = frontier.ages_s
    assert device_s == pytest.approx(10, abs=1.5)
    assert host_s == pytest.approx(20, abs=1.5)
    assert host_s == disk_s == pool_s, "there are no such tiers"


def test_what_is_pushed_out_costs_what_it_takes_to_have_it_again() -> None:
    """Behind the device of one there is memory, behind that of another nothing. In both, runs come back as often."""
    places, costs = Places(), EngineCosts(_RATES)
    fates: dict[str, Callable[[int], int | None]] = {
        "with memory": lambda block: Tier.HOST,
        "without": lambda block: None,
    }
    for number in range(100):
        for name, fate in fates.items():
            places.begun(f"{name} {number % 3}", 10.0 * number)
            places.ended(f"{name} {number % 3}", name, number, 10.0 * number, fate)
    found = {name: places.around(name, Load(costs), None, 1000.0).push_s for name in fates}
    odds = places.odds.after(10.0)
    assert odds > 0.5
    assert found["with memory"][Tier.DEVICE] == pytest.approx(odds / _RATES.host, rel=0.2)
    assert found["with memory"][Tier.HOST] == 0, "nothing leaves that"
    assert found["without"][Tier.DEVICE] == pytest.approx(odds * costs.token_s(int(places.mean_prompt) // 2), rel=0.2)
    assert found["without"][Tier.POOL] < found["without"][Tier.DISK] < found["without"][Tier.HOST]


def test_runs_are_expected_where_they_were() -> None:
    places, load, now_s = Places(), Load(EngineCosts(_RATES)), 0.0
    for _ in range(200):  # one run steps every five seconds at a
        places.begun("busy", now_s)
        places.served(1000, 0.5)
        places.ended("busy", "a", 1, now_s + 1, lambda block: Tier.DEVICE)
        now_s += 5.0
    assert not places.is_new("busy")
    assert places.is_new("other")
    here, there = places.place("a"), places.place("b")
    places.look(here, load, now_s - 4)
    places.look(there, load, now_s - 4)
    assert here.due_rate > 0.03
    assert there.due_rate == 0
    places.begun("busy", now_s)
    places.look(here, load, now_s)
    assert here.due_rate == 0, "its step is there"
    assert places.mean_square_s == pytest.approx(0.25, rel=0.2)
