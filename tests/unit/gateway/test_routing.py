"""The policies, on values alone."""

import random
from collections import Counter

import pytest
from msgspec import structs

from gateway.policy.costs import EngineCosts, Rates
from gateway.policy.load import Load
from gateway.policy.pricing import Asked, Surroundings
from gateway.routing import POLICIES, ExpectedTtft, InstanceView, Request, RoundRobin, decide, usable_hits
from tracing.record import Decision

_RATES = Rates(prefill=1000.0, host=100_000.0, disk=10_000.0, pool=5_000.0, peer=20_000.0)


def _view(
    instance: str,
    hits: tuple[int, int, int, int] = (0, 0, 0, 0),
    queued: int = 0,
    running: int = 0,
    rates: Rates = _RATES,
    **more: object,
) -> InstanceView:
    load = Load(EngineCosts(rates))
    for _ in range(running):
        load.reserve(0, 0, 0.0)
    if queued:
        load.reserve(queued, queued, 0.0)
    return InstanceView(instance, hits, load, **more)  # type: ignore[arg-type]


def _decided(
    *views: InstanceView, prompt: int = 4000, policy: str = "expected-ttft", group: str = "", pulls: bool = False
) -> Decision:
    request = Request(Asked(prompt), group, pulls)
    decision = decide(views, request, POLICIES[policy](), random.Random(0), 0.0)
    assert decision is not None
    return decision


def _chosen(*views: InstanceView, prompt: int = 4000, policy: str = "expected-ttft") -> str:
    return _decided(*views, prompt=prompt, policy=policy).instance


def test_the_warm_instance_wins_while_waiting_costs_less_than_computing() -> None:
    assert _chosen(_view("warm", (3200, 0, 0, 0)), _view("cold")) == "warm"
    assert _chosen(_view("warm", (3200, 0, 0, 0), queued=2500), _view("cold")) == "warm"
    assert _chosen(_view("warm", (3200, 0, 0, 0), queued=3400), _view("cold")) == "cold"


def test_a_faster_tier_wins_and_a_slow_one_still_beats_computing() -> None:
    device, host, pool = (
        _view("device", (3200, 0, 0, 0)),
        _view("host", (0, 3200, 0, 0)),
        _view("pool", (0, 0, 0, 3200)),
    )
    assert _chosen(pool, host, device) == "device"
    assert _chosen(pool, host) == "host"
    assert _chosen(pool, _view("cold")) == "pool"


def test_what_computing_beats_is_not_fetched_and_the_decision_says_what_is() -> None:
    fetched = _decided(_view("a", (800, 0, 0, 2400)))
    assert fetched.fetch_tokens == (0, 0, 2400, 0)
    slow = _view("a", (800, 0, 0, 2400), rates=Rates(prefill=1000.0, host=1e5, disk=1e4, pool=500.0))
    assert _decided(slow).fetch_tokens is None


def test_pages_are_pulled_from_a_peer_where_instances_can_and_it_is_busy() -> None:
    views = _view("busy", (3200, 0, 0, 0), queued=20_000), _view("idle")
    pulled = _decided(*views, pulls=True)
    assert (pulled.instance, pulled.fetch_from, pulled.fetch_tokens) == ("idle", "busy", (0, 0, 0, 3200))
    assert (_decided(*views).fetch_from, _decided(*views).fetch_tokens) == (None, None)


def test_sick_and_excluded_instances_are_shown_and_not_chosen() -> None:
    views = [_view("sick", (3200, 0, 0, 0), healthy=False), _view("tried", (1600, 0, 0, 0)), _view("left")]
    request, chance = Request(Asked(4000)), random.Random(0)
    decision = decide(views, request, ExpectedTtft(), chance, 0.0, without=frozenset({"tried"}))
    assert decision is not None
    assert decision.instance == "left"
    assert [(c.instance, c.healthy) for c in decision.candidates] == [("sick", False), ("tried", True), ("left", True)]
    assert decide(views[:1], request, ExpectedTtft(), chance, 0.0) is None


def test_ties_are_shared_and_follow_the_seed() -> None:
    def run(seed: int) -> list[str]:
        chance, request = random.Random(seed), Request(Asked(10))
        views = [_view("a"), _view("b"), _view("c")]
        return [d.instance for _ in range(300) if (d := decide(views, request, ExpectedTtft(), chance, 0.0))]

    assert run(1) == run(1) != run(2)
    assert min(Counter(run(1)).values()) > 60


def test_a_decision_is_exact_only_for_hashed_prompts_on_whole_feeds() -> None:
    for hashed, exact in ((True, True), (True, False), (False, True)):
        view = _view("a", exact=exact)
        decision = decide([view], Request(Asked(10)), ExpectedTtft(), random.Random(0), 0.0, hashed=hashed)
        assert decision is not None
        assert decision.exact == (hashed and exact)


def test_what_is_pushed_out_counts_only_where_it_would_come_back() -> None:
    full, half_dead = Surroundings(push_s=(9e-4, 9e-4, 9e-4, 9e-4)), Surroundings(push_s=(1e-4, 1e-4, 1e-4, 1e-4))
    views = _view("full", queued=10, around=half_dead), _view("fuller", around=full)
    assert _chosen(*views) == "full"
    assert _chosen(views[0], structs.replace(views[1], around=Surroundings())) == "fuller"


def test_what_is_only_moved_to_memory_that_is_near_hardly_counts() -> None:
    """The slower tiers give up what would have to be computed again; so what comes to these as well costs more."""
    around = Surroundings(push_s=(1e-3, 9e-4, 0.0, 0.0))
    known, new = _view("known", (0, 3200, 0, 0), around=around), _view("new", around=around)
    costs = [candidate.cost_ns for candidate in _decided(known, new).candidates]
    ttfts = [candidate.expected_ttft_ns for candidate in _decided(known, new).candidates]
    pushed_s = [(cost - ttft) / 1e9 for cost, ttft in zip(costs, ttfts, strict=True) if cost is not None]
    assert pushed_s == pytest.approx([4000 * 1e-3 - 3200 * 9e-4, 4000 * 1e-3])


def test_of_equals_the_one_is_taken_that_did_less_lately() -> None:
    busy, rested = _view("busy"), _view("rested")
    for view, tokens in ((busy, 5000), (rested, 3000)):
        reservation = view.load.reserve(tokens, tokens, -60.0)
        reservation.answered(tokens / 1000 - 60.0)
        reservation.release(-30.0)
    assert {_chosen(busy, rested), _chosen(rested, busy)} == {"rested"}
    warm = structs.replace(busy, hit_tokens=(3200, 0, 0, 0))
    assert _chosen(warm, rested) == "busy", "it weighs little"


def test_a_run_begins_where_less_was_done_and_does_not_move_for_it() -> None:
    busy, rested = _view("busy", (800, 0, 0, 0)), _view("rested")
    reservation = busy.load.reserve(20_000, 20_000, -60.0)
    reservation.answered(-40.0)
    reservation.release(-30.0)
    for further_steps, instance in ((0.0, "busy"), (5.0, "rested")):
        asked = Request(Asked(4000, further_steps=further_steps))
        decision = decide((busy, rested), asked, ExpectedTtft(), random.Random(0), 0.0)
        assert decision is not None
        assert decision.instance == instance


def test_what_was_done_half_an_hour_ago_is_not_forgotten() -> None:
    busy, rested = _view("busy"), _view("rested")
    for view, tokens, at_s in ((busy, 50_000, -1800.0), (rested, 5000, -60.0)):
        reservation = view.load.reserve(tokens, tokens, at_s)
        reservation.answered(at_s + tokens / 1000)
        reservation.release(at_s + tokens / 1000)
        view.load.busy_at(0.0)
    assert {_chosen(busy, rested), _chosen(rested, busy)} == {"rested"}


def test_a_large_prompt_keeps_away_from_where_steps_are_due() -> None:
    views = _view("lively", around=Surroundings(due_rate=1.0)), _view("quiet", queued=100)
    assert _chosen(*views, prompt=20_000) == "quiet"
    assert _chosen(*views, prompt=50) == "lively"


def test_a_full_device_is_waited_for() -> None:
    full = _view("full", around=Surroundings(capacity_tokens=10_000))
    full.load.reserve(8000, 0, 0.0, output_tokens=500).answered(0.0)
    assert _chosen(full, _view("other", queued=100)) == "other"


@pytest.mark.parametrize("waited", [False, True])
def test_a_prompt_costs_those_who_wait_for_memory_where_somebody_is_seen_to(waited: bool) -> None:
    """That running answers seem to fill a device is not enough: what they have in common is counted for each."""
    view = _view("full", around=Surroundings(due_rate=0.1, capacity_tokens=10_000))
    costs = view.load.costs
    for _ in range(50):  # decoding beside prompts stands still
        costs.learn_step(0.0, 0.0, 0.02)
        costs.learn_step(0.0, 1.0, 0.2)
    came_s = -60.0 if waited else -4.0
    view.load.reserve(8000, 4000, came_s, output_tokens=1000).answered(0.0)
    price = _decided(view).candidates[0]
    assert price.cost_ns is not None
    work_s = costs.prompt_s(4000, 0, view.load.context_tokens)
    others_s = 0.1 * work_s * costs.stall_share * 1000 * costs.step_s(view.load.context_tokens)
    assert others_s > 1
    assert ((price.cost_ns - price.expected_ttft_ns) / 1e9 > others_s) == waited


def test_idle_instances_share_decodes_though_one_of_them_is_warm() -> None:
    """A common system prompt that is soon computed does not gather all sessions in one place."""
    warm = _view("warm", (500, 0, 0, 0))
    for number in range(12):
        warm.load.reserve(8000, 0, float(number), output_tokens=500).answered(float(number))
    warm.load.costs.steps.weights[1] = 1e-6
    request = Request(Asked(600, output_tokens=500))
    decision = decide([warm, _view("cool")], request, ExpectedTtft(), random.Random(0), 20.0)
    assert decision is not None
    assert decision.instance == "cool"


def test_a_run_is_put_where_its_later_steps_have_room_and_stays_there() -> None:
    """What a second copy of the opening takes pays for many steps and not for one."""
    warm = _view("warm", (500, 0, 0, 0))
    for number in range(3):
        warm.load.reserve(8000, 0, float(number), output_tokens=500).answered(float(number))
    warm.load.costs.steps.weights[1] = 1e-7
    for further_steps, instance in ((0.0, "warm"), (9.0, "cool")):
        request = Request(Asked(600, output_tokens=500, further_steps=further_steps))
        decision = decide([warm, _view("cool")], request, ExpectedTtft(), random.Random(0), 20.0)
        assert decision is not None
        assert decision.instance == instance


def test_a_long_prompt_lets_those_go_first_that_soon_have_their_pages() -> None:
    fetching = _view("fetching")
    fetching.load.reserve(9000, 1000, 0.0, fetch=(8000, 0, 0, 0))
    views = fetching, _view("idle", queued=10)
    assert _chosen(*views, prompt=4000) == "idle"
    assert _chosen(*views, prompt=10) == "fetching"  # done before


def test_the_other_policies() -> None:
    views = [_view("a", running=2), _view("b", running=1), _view("c", running=3)]
    assert _chosen(*views, policy="fewest-requests") == "b"
    turn, chance = RoundRobin(), random.Random(0)
    turns = [d.instance for _ in range(5) if (d := decide(views, Request(Asked(10)), turn, chance, 0.0))]
    assert turns == ["a", "b", "c", "a", "b"]
    assert _chosen(_view("a", queued=50), _view("b", queued=40), policy="fewest-tokens") == "b"
    held = _view("a"), _view("b")
    held[0].load.reserve(5000, 0, 0.0, output_tokens=10)
    assert _chosen(*held, policy="fewest-tokens") == "b"
    prefix = _view("a", (320, 0, 0, 0), queued=10**6), _view("b", (160, 0, 0, 0)), _view("c", pending_tokens=170)
    assert _chosen(*prefix, policy="prefix") == "a"
    assert _chosen(*prefix[1:], policy="prefix") == "c"


def test_a_session_keeps_its_instance_and_only_those_of_a_lost_one_move() -> None:
    names, groups = [f"i{n}" for n in range(8)], [f"run-{n}" for n in range(400)]

    def homes(instances: list[str]) -> dict[str, str]:
        views = [_view(name) for name in instances]
        return {group: _decided(*views, policy="session-hash", group=group).instance for group in groups}

    before, after = homes(names), homes(names[1:])
    assert min(Counter(before.values()).values()) > 20
    assert {group for group in groups if before[group] != after[group]} == {
        group for group in groups if before[group] == "i0"
    }


def test_every_policy_shows_what_is_expected_of_each_instance() -> None:
    for name in POLICIES:
        decision = _decided(_view("a", (3200, 0, 0, 0)), _view("b"), policy=name)
        assert decision.policy == name
        expected = [candidate.expected_ttft_ns for candidate in decision.candidates]
        assert expected[0] < expected[1]
        assert all(c.cost_ns is not None and c.cost_ns >= c.expected_ttft_ns for c in decision.candidates)


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


def test_what_is_on_its_way_counts_as_there_and_its_queue_is_waited_for() -> None:
    """A second request on a cold prefix joins the first while its queue costs less than computing it elsewhere."""
    joined = _view("a", queued=1000, pending_tokens=960)
    decision = _decided(joined, _view("b", queued=100), prompt=1000)
    assert (decision.instance, decision.predicted_hit_tokens) == ("a", 0), "what is on its way is not claimed"
    busier = _view("a", queued=1300, pending_tokens=960)
    decision = _decided(busier, _view("b", queued=100), prompt=1000)
    assert (decision.instance, decision.predicted_hit_tokens) == ("b", 0)


def test_a_burst_on_a_cold_prefix_is_shared_and_computed_once_an_instance() -> None:
    """32 requests at once that share 8,000 tokens and bring 200 each: instances that compute the prefix get their share
    of those that wait for it, and a busy fleet's few idle instances are not all taken by it."""

    def burst(views: list[InstanceView]) -> list[int]:
        chance, coming, taken = random.Random(0), [0] * len(views), [0] * len(views)
        for _ in range(32):
            seen = [structs.replace(view, pending_tokens=there) for view, there in zip(views, coming, strict=True)]
            decision = decide(seen, Request(Asked(8200, further_steps=0.1)), ExpectedTtft(), chance, 0.0)
            assert decision is not None
            at = int(decision.instance[1:])
            views[at].load.reserve(8200, 8200 - coming[at], 0.0)
            coming[at], taken[at] = 8000, taken[at] + 1
        return taken

    assert max(burst([_view(f"i{n}") for n in range(8)])) <= 5
    taken = burst([_view("i0"), *(_view(f"i{n}", queued=20_000) for n in range(1, 8))])
    assert taken[0] == 32
