"""What instances cost: the compiled loop against the interpreted one, on fleets in any state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy import pricing
from gateway.policy.costs import EngineCosts, Fetch, Rates
from gateway.policy.load import Load
from gateway.policy.pricing import Asked, Surroundings, Weights, interpreted_prices, prices
from gateway.routing import InstanceView

_prices = pytest.importorskip("gateway.policy._prices", reason="there was no C compiler at installation")

NOW_S = 1000.0
shares = st.floats(0, 1)
tokens = st.integers(0, 40_000)
rates = st.builds(
    Rates,
    prefill=st.floats(100, 1e5),
    host=st.floats(1e4, 1e7),
    disk=st.floats(1e3, 1e6),
    pool=st.floats(1e3, 1e6),
    peer=st.none() | st.floats(1e4, 1e6),
)


@st.composite
def loads(draw: st.DrawFn, costs: EngineCosts) -> Load:
    """A load after some requests: waiting, decoding, fetching, or none at all."""
    load = Load(costs)
    load.pace = draw(st.sampled_from([1.0, 1.1, 0.5, 3.0]))
    for number in range(draw(st.integers(0, 3))):
        new, prompt = draw(tokens), draw(tokens)
        fetch = draw(st.sampled_from([None, (100, 0, 50, 0)]))
        came_s = NOW_S - 3 + number
        reservation = load.reserve(max(prompt, new), new, came_s, draw(st.floats(0, 1000)), fetch)
        if draw(st.booleans()):
            reservation.answered(came_s + 0.5)
    load.link_free_s = draw(st.sampled_from([load.link_free_s, NOW_S + 2]))
    return load


@st.composite
def views(draw: st.DrawFn) -> list[InstanceView]:
    """A fleet of one or two kinds of engines."""
    kinds = draw(st.lists(rates.map(EngineCosts), min_size=1, max_size=2))
    fleet = []
    for number in range(draw(st.integers(1, 6))):
        load = draw(loads(draw(st.sampled_from(kinds))))
        hits = draw(st.sampled_from([(0, 0, 0, 0), (512, 0, 0, 0), (256, 256, 0, 128), (0, 64, 64, 0)]))
        pushed = draw(st.sampled_from([(0.0, 0.0, 0.0, 0.0), (1e-4, 5e-5, 2e-5, 1e-5)]))
        around = Surroundings(draw(st.floats(0, 20)), pushed, draw(st.none() | st.floats(1000, 1e6)))
        fleet.append(InstanceView(f"i{number}", hits, load, around, pending_tokens=draw(st.sampled_from([0, 0, 64]))))
    return fleet


@given(
    fleet=views(),
    asked=st.builds(Asked, st.integers(600, 40_000), st.floats(0, 2000), st.floats(0, 30), st.floats(0, 10)),
    weights=st.builds(Weights, decode=shares, idle=st.sampled_from([1.0, 4.0]), balance=shares, own_share=shares),
    pulls=st.booleans(),
)
def test_both_loops_find_the_same_prices(
    fleet: list[InstanceView], asked: Asked, weights: Weights, pulls: bool
) -> None:
    source = max(range(len(fleet)), key=lambda at: fleet[at].hit_tokens[0]) if pulls else None
    compiled = prices(fleet, asked, NOW_S, source, weights)
    expected = interpreted_prices(fleet, asked, NOW_S, source, weights)
    assert [(each.new_tokens, each.fetch) for each in compiled] == [(each.new_tokens, each.fetch) for each in expected]
    for ours, theirs in zip(compiled, expected, strict=True):
        assert ours.cost_s == pytest.approx(theirs.cost_s, rel=1e-9, abs=1e-12)
        assert ours.ttft_s == pytest.approx(theirs.ttft_s, rel=1e-9, abs=1e-12)


def test_without_a_compiler_the_formula_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "COMPILED", False)
    fleet = [InstanceView(name, (64, 0, 0, 0), Load(EngineCosts(Rates(1e4, 1e6, 1e5, 1e5)))) for name in "ab"]
    asked = Asked(1000, 10.0)
    assert prices(fleet, asked, NOW_S) == interpreted_prices(fleet, asked, NOW_S)


def test_a_fleet_of_nobody_has_no_prices() -> None:
    assert _prices.prices([], (0.0,) * 11, 100, -1, None, None, pricing.Price) == []


def test_what_is_no_offer_is_an_error_and_none_is_lost_on_the_way() -> None:
    good = InstanceView("a", (0, 0, 0, 0), Load(EngineCosts(Rates(1e4, 1e6, 1e5, 1e5))))
    terms = (0.0,) * 11

    def priced(*offers: Any, numbers: Any = terms) -> object:
        return _prices.prices(list(offers), numbers, 100, -1, None, None, pricing.Price)

    with pytest.raises(AttributeError):
        priced(good, object())
    with pytest.raises(IndexError):
        priced(good, numbers=terms[:-1])
    with pytest.raises(TypeError):
        priced(good, numbers=("a",) * 11)
    with pytest.raises(TypeError):
        priced(InstanceView("b", (0, "x", 0, 0), good.load))  # type: ignore[arg-type]


def test_an_error_of_what_is_asked_on_the_way_is_raised() -> None:
    def fails(*_: object) -> Any:
        raise ZeroDivisionError

    view = InstanceView("a", (0, 64, 0, 0), Load(EngineCosts(Rates(1e4, 1e6, 1e5, 1e5))))
    with pytest.raises(ZeroDivisionError):
        _prices.prices([view], (0.0,) * 11, 100, -1, fails, fails, pricing.Price)
    with pytest.raises(TypeError):
        _prices.prices([view], (0.0,) * 11, 100, -1, fails, lambda *_: (1.0, Fetch()), pricing.Price)
