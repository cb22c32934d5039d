from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.console.formats import ago, count, duration, iso_moment, moment, money, share


@given(st.integers(-(2**63), 2**63))
def test_money_is_exact_to_the_nano(nano: int) -> None:
    text = str(money(nano, "USD")).replace("$", "").replace(",", "").replace("−", "-")
    assert Decimal(text) * 10**9 == nano


@pytest.mark.parametrize(
    ("nano", "currency", "lead", "rest"),
    [
        (1_234_567, "USD", "$0.0012", "34567"),
        (0, "USD", "$0.0000", "00000"),
        (-5, "EUR", "−€0.0000", "00005"),
        (1_234_567_890_123_456, "CHF", "CHF 1,234,567.8901", "23456"),
    ],
)
def test_money_has_a_lead_and_a_rest(nano: int, currency: str, lead: str, rest: str) -> None:
    assert (money(nano, currency).lead, money(nano, currency).rest) == (lead, rest)


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 10, "0%"), (10, 10, "100%"), (9999, 10_000, "99.9%"), (999_999, 1_000_000, "99.9%"), (1, 10**6, "<0.1%"),
     (35, 1000, "3.5%"), (898, 1000, "89%"), (0, 0, "–"), (5, 0, "–")],
)  # fmt: skip
def test_a_share_is_never_rounded_up(part: int, whole: int, text: str) -> None:
    assert share(part, whole) == text


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_only_all_is_a_hundred_percent_and_only_nothing_is_zero(part: int, more: int) -> None:
    whole = part + more
    assert share(part, whole) != "100%"
    assert (share(part, whole) == "0%") is (part == 0)
    assert share(whole, whole) == "100%"


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, "–"), (0, "0 µs"), (1_500, "2 µs"), (999_400, "999 µs"), (999_600, "1 ms"), (41_234_567, "41.2 ms"),
     (999_400_000, "999 ms"), (999_600_000, "1 s"), (1_234_000_000, "1.23 s"), (59_900_000_000, "59.9 s"),
     (59_999_000_000, "1 min 00 s"), (125 * 10**9, "2 min 05 s"), (3725 * 10**9, "1 h 02 min"), (-5_000_000, "−5 ms")],
)  # fmt: skip
def test_a_duration_takes_the_unit_that_fits(ns: int | None, text: str) -> None:
    assert duration(ns) == text


def test_moments_are_utc() -> None:
    assert moment(1_790_000_000 * 10**9 + 999) == "2026-09-21 14:13:20"
    assert iso_moment(1_790_000_000 * 10**9) == "2026-09-21T14:13:20Z"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (90_000, "25 h ago"),
                          (200_000, "2 d ago"), (-5, "0 s ago")],
)  # fmt: skip
def test_how_long_ago(seconds: int, text: str) -> None:
    assert ago(10**18, 10**18 + seconds * 10**9) == text


def test_counts_have_their_thousands_apart() -> None:
    assert count(1234567) == "1,234,567"
