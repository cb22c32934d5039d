"""The meter: exact, additive, and honest about what it does not know."""

from __future__ import annotations

import pytest

from billing.meter import charge, recharge, storage_charge
from billing.prices import PriceBook
from billing.rates import Rounding, RoundingMode
from tracing.record import ChargeLine, Usage, UsageSource

ENGINE = UsageSource.ENGINE


def book(
    rates: str = "{ fresh = 1, hit = 0.1, hit_disk = 0.2, output = 2 }", entry: str = "", top: str = ""
) -> PriceBook:
    text = f'name = "t"\ncurrency = "USD"\n{top}\n[[price]]\nmodels = ["m"]\nrates = {rates}\n{entry}'
    return PriceBook.from_toml(text)


def test_each_class_is_a_line_and_the_amount_is_their_sum() -> None:
    usage = Usage(fresh_tokens=100, hit_device_tokens=50, hit_disk_tokens=10, output_tokens=5, source=ENGINE)
    result = charge(usage, book(), "m", 0)
    assert result.lines == (
        ChargeLine("fresh", 100, 100_000),
        ChargeLine("hit_device", 50, 5_000),
        ChargeLine("hit_disk", 10, 2_000),
        ChargeLine("output", 5, 10_000),
    )
    assert result.amount_nano == 117_000
    assert result.saved_nano == 50 * 900 + 10 * 800
    assert (result.currency, result.price_version) == ("USD", book().version)


def test_the_charge_can_be_made_again_from_its_basis() -> None:
    usage = Usage(fresh_tokens=7, output_tokens=1, source=ENGINE)
    result = charge(usage, book(), "m", 123, team="a", region="eu", service_tier="default")
    assert result.basis is not None
    assert result.basis.rule == "price[0] m"
    assert recharge(usage, book(), result.basis) == result


@pytest.mark.parametrize(
    ("usage", "model", "reason"),
    [
        (None, "m", "usage_missing"),
        (Usage(output_tokens=5, source=UsageSource.MISSING), "m", "usage_missing"),
        (Usage(fresh_tokens=1, source=ENGINE), "other", "no_price"),
        (Usage(fresh_tokens=1, write_1h_tokens=1, source=ENGINE), "m", "no_rate:write_1h"),
    ],
)
def test_what_is_not_known_is_unpriced_and_never_zero(usage: Usage | None, model: str, reason: str) -> None:
    result = charge(usage, book(), model, 0)
    assert result.unpriced_reason == reason
    assert result.amount_nano is None
    assert result.saved_nano is None
    assert result.lines == ()


def test_nothing_computed_costs_nothing_whatever_the_model() -> None:
    result = charge(Usage(source=UsageSource.NONE), book(entry="request_fee = 1"), "other", 0)
    assert (result.amount_nano, result.saved_nano, result.unpriced_reason) == (0, 0, None)


def test_a_written_token_takes_the_write_rate_in_place_of_the_fresh_one() -> None:
    rates = "{ fresh = 5, hit = 0.5, write = 6.25, write_5m = 6.25, write_1h = 10, output = 25 }"
    usage = Usage(fresh_tokens=3, write_5m_tokens=600_000, write_1h_tokens=400_000, source=ENGINE)
    result = charge(usage, book(rates), "m", 0)
    assert result.amount_nano == 15_000 + 7_750_000_000
    assert result.saved_nano == -(600_000 * 1_250 + 400_000 * 5_000)  # writing cost more than computing would have


def test_reasoning_is_a_line_only_where_it_has_a_rate() -> None:
    usage = Usage(output_tokens=100, reasoning_tokens=40, source=ENGINE)
    assert charge(usage, book(), "m", 0).lines == (ChargeLine("output", 100, 200_000),)
    apart = charge(usage, book("{ fresh = 1, output = 2, reasoning = 4 }"), "m", 0)
    assert apart.lines == (ChargeLine("output", 60, 120_000), ChargeLine("reasoning", 40, 160_000))


def test_fee_and_minimum_are_lines() -> None:
    usage = Usage(fresh_tokens=1, source=ENGINE)
    fee = charge(usage, book(entry="request_fee = 0.01"), "m", 0)
    assert fee.lines[-1] == ChargeLine("request", 1, 10_000_000)
    least = charge(usage, book(entry="request_minimum = 0.001"), "m", 0)
    assert least.lines == (ChargeLine("fresh", 1, 1_000), ChargeLine("minimum", 1, 999_000))
    assert least.amount_nano == 1_000_000


def test_a_minimum_that_both_meet_leaves_nothing_saved() -> None:
    usage = Usage(hit_device_tokens=100, source=ENGINE)
    assert charge(usage, book(entry="request_minimum = 1"), "m", 0).saved_nano == 0


@pytest.mark.parametrize(
    ("mode", "of_half", "of_three_halves", "of_tenth"),
    [("half_even", 0, 2, 0), ("half_up", 1, 2, 0), ("up", 1, 2, 1), ("down", 0, 1, 0)],
)
def test_rounding_modes(mode: str, of_half: int, of_three_halves: int, of_tenth: int) -> None:
    rounding = Rounding(RoundingMode(mode))
    assert [rounding.divide(n, 10) for n in (5, 15, 1)] == [of_half, of_three_halves, of_tenth]
    assert [rounding.divide(-n, 10) for n in (5, 15, 1)] == [-of_half, -of_three_halves, -of_tenth]


def test_lines_share_a_sum_that_is_rounded_once() -> None:
    rates = "{ fresh = 0.0004, hit = 0.0004, output = 0.0004 }"  # 0.4 nano-units a token
    usage = Usage(fresh_tokens=1, hit_device_tokens=1, output_tokens=1, source=ENGINE)
    by_line = charge(usage, book(rates), "m", 0)
    by_request = charge(usage, book(rates, top='rounding = { level = "request" }'), "m", 0)
    assert by_line.amount_nano == 0
    assert by_request.amount_nano == 1
    assert sorted(line.amount_nano for line in by_request.lines) == [0, 0, 1]


def test_storage_is_prorated_exactly() -> None:
    half_an_hour = 1800 * 10**9
    assert storage_charge(1_000_000, half_an_hour, 4_500_000_000_000, Rounding()) == 2_250_000_000
