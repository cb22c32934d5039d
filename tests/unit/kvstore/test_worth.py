from __future__ import annotations

import math

import pytest

from kvstore.deadline import Allowance
from kvstore.page import Tier
from kvstore.worth import FetchRate, FetchWorth, PrefillRate, RateFit, WorthOptions

MIB = 1 << 20


def worth(prefill: float | None = 1000.0, **options: object) -> FetchWorth:
    return FetchWorth(WorthOptions(prefill_tokens_per_s=prefill, **options))  # type: ignore[arg-type]


def leading(subject: FetchWorth, tiers: list[Tier], page_bytes: int = MIB) -> int:
    return subject.leading(tiers, page_bytes=page_bytes, page_tokens=16)


def test_everything_is_claimed_while_nobody_knows_how_fast_the_engine_is() -> None:
    assert leading(worth(None), [Tier.POOL] * 5) == 5


def test_a_fast_tier_is_claimed_whole() -> None:
    assert leading(worth(), [Tier.DISK] * 100) == 100


def test_a_tier_that_turned_slow_is_refused_after_a_few_reads() -> None:
    subject = worth()  # a page of 16 tokens takes 16 ms to compute
    for _ in range(3):
        subject.fetched(Tier.POOL, 8 * MIB, 8 * 0.05, now_s=0.0)
    assert leading(subject, [Tier.POOL] * 64) == 0
    assert leading(subject, [Tier.DISK] * 64) == 64


def test_pages_of_a_slow_tier_end_what_is_claimed_of_a_fast_one() -> None:
    subject = worth()
    for _ in range(5):
        subject.fetched(Tier.POOL, 8 * MIB, 4.0, now_s=0.0)
    assert leading(subject, [Tier.DISK] * 10 + [Tier.POOL] * 10) == 10


def test_a_few_slow_pages_are_taken_for_the_many_fast_ones_behind_them() -> None:
    subject = worth()
    for _ in range(10):
        subject.fetched(Tier.POOL, MIB, 0.05, now_s=0.0)
    assert leading(subject, [Tier.POOL] + [Tier.DISK] * 100) == 101
    assert leading(subject, [Tier.POOL, Tier.DISK]) == 0


def test_latency_makes_few_pages_not_worth_what_many_are() -> None:
    subject = worth()
    for size in (1, 8, 2, 6) * 4:
        subject.fetched(Tier.POOL, size * MIB, 0.05 + size * 0.001, now_s=0.0)
    assert leading(subject, [Tier.POOL] * 2) == 0
    assert leading(subject, [Tier.POOL] * 8) == 8


def test_the_margin_asks_for_more_than_a_draw() -> None:
    for margin, claimed in ((1.0, 8), (4.0, 0)):
        subject = worth(margin=margin)
        for _ in range(20):
            subject.fetched(Tier.DISK, 8 * MIB, 0.064, now_s=0.0)  # half of the 128 ms that computing takes
        assert leading(subject, [Tier.DISK] * 8) == claimed


def test_a_read_that_brought_nothing_counts_as_waiting() -> None:
    subject = worth()
    for _ in range(4):
        subject.fetched(Tier.POOL, 0, 0.1, now_s=0.0)
    assert leading(subject, [Tier.POOL] * 2) == 0


def test_a_refused_tier_is_due_for_a_read_and_recovers_by_it() -> None:
    subject = worth(doubt_s=5.0)
    for _ in range(3):
        subject.fetched(Tier.POOL, 8 * MIB, 4.0, now_s=100.0)
    assert subject.due(200.0) == []  # nobody wanted it
    assert leading(subject, [Tier.POOL] * 8) == 0
    assert subject.due(104.9) == []
    assert subject.due(105.0) == [Tier.POOL]
    for second in range(8):
        subject.fetched(Tier.POOL, 8 * MIB, 0.01, now_s=105.0 + second)
    assert subject.due(200.0) == []
    assert leading(subject, [Tier.POOL] * 8) == 8


def test_a_line_is_found_again() -> None:
    fit = RateFit(0.2, FetchRate(0.1, 1e6))
    for size in (1, 5, 3, 9, 2, 7) * 20:
        fit.observe(size * MIB, 0.02 + size * MIB / 2e9)
    assert fit.rate.latency_s == pytest.approx(0.02, rel=0.05)
    assert fit.rate.bytes_per_s == pytest.approx(2e9, rel=0.05)


def test_reads_of_one_size_are_foretold_at_that_size() -> None:
    fit = RateFit(0.3, FetchRate(0.0, 1e9))
    for _ in range(40):
        fit.observe(4 * MIB, 0.5)
    assert fit.rate.seconds(4 * MIB) == pytest.approx(0.5, rel=0.02)
    assert fit.rate.latency_s >= 0


def test_a_line_never_falls_and_never_promises_less_than_nothing() -> None:
    fit = RateFit(0.3, FetchRate(0.001, 1e9))
    for size, took in ((8, 0.001), (1, 0.5)) * 10:
        fit.observe(size * MIB, took)
    assert fit.rate.latency_s >= 0
    assert fit.rate.bytes_per_s > 0


def test_waiting_does_not_make_an_engine_slow() -> None:
    rate = PrefillRate()
    rate.observe(1000, 1.0)
    for _ in range(5):
        rate.observe(1000, 50.0)
    assert rate.tokens_per_s is not None
    assert rate.tokens_per_s > 850
    for _ in range(500):
        rate.observe(1000, 10.0)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.1)


def test_a_given_rate_stays() -> None:
    rate = PrefillRate(500.0, is_given=True)
    rate.observe(1000, 0.1)
    assert rate.tokens_per_s == 500.0


def test_what_took_no_time_was_no_prompt() -> None:
    rate = PrefillRate()
    rate.observe(1000, 0.0)
    rate.observe(0, 1.0)
    assert rate.tokens_per_s is None


def test_a_tier_that_is_slow_to_answer_is_asked_only_for_much() -> None:
    subject = worth()
    for _ in range(20):
        subject.asked(Tier.POOL, 0.1)
    few, many = [Tier.POOL] * 4, [Tier.POOL] * 64
    assert subject.leading(few, page_bytes=1024, page_tokens=16, unasked=Tier.POOL) == 0
    assert subject.leading(many, page_bytes=1024, page_tokens=16, unasked=Tier.POOL) == 64
    assert subject.leading(few, page_bytes=1024, page_tokens=16) == 4  # its answer is there: the time is spent


@pytest.mark.parametrize("prefill", [1000.0, None])
def test_a_tier_that_was_late_is_not_waited_for_again_until_a_read_has_come_in_time(prefill: float | None) -> None:
    subject = worth(prefill, allowed=Allowance(0.1, 100_000_000), doubt_s=5.0, late_doubt_s=1.0)
    subject.fetched(Tier.POOL, 0, 0.1, now_s=100.0)
    assert leading(subject, [Tier.DISK] * 3 + [Tier.POOL] * 3) == 3
    assert leading(subject, [Tier.POOL] * 10_000) == 0  # however much it would save
    assert subject.due(100.9) == []
    assert subject.due(101.0) == [Tier.POOL]
    subject.fetched(Tier.POOL, 0, 0.001, now_s=101.0)  # it answers, and has brought nothing yet
    assert leading(subject, [Tier.POOL] * 100) == 0
    subject.fetched(Tier.POOL, 4 * MIB, 0.01, now_s=102.0)
    assert leading(subject, [Tier.POOL] * 100) == 100


def test_nothing_is_claimed_that_would_come_too_late() -> None:
    subject = worth(1.0, allowed=Allowance(0.1, 100_000_000))  # computing a page takes 16 s
    for _ in range(20):
        subject.fetched(Tier.POOL, 4 * MIB, 0.1, now_s=0.0)  # 25 ms a page, of which 10 are allowed, and 100 for all
    assert leading(subject, [Tier.POOL] * 20) == 6
    assert leading(subject, [Tier.DISK] * 20) == 20


def test_a_read_in_time_tells_how_long_an_answer_takes() -> None:
    subject = worth()
    for _ in range(20):
        subject.asked(Tier.POOL, 0.1)
    few = [Tier.POOL] * 4
    assert subject.leading(few, page_bytes=1024, page_tokens=16, unasked=Tier.POOL) == 0
    subject.fetched(Tier.POOL, MIB, 0.002, now_s=0.0)
    assert subject.leading(few, page_bytes=1024, page_tokens=16, unasked=Tier.POOL) == 4


def test_who_waits_is_as_patient_as_computing_takes() -> None:
    assert worth(None).patience_s(100, 16) is None
    assert worth(1000.0).patience_s(100, 16) == pytest.approx(1.6)
    assert worth(1000.0, margin=0.5).patience_s(100, 16) == pytest.approx(3.2)
    assert worth(1000.0).patience_s(1, 16) == pytest.approx(0.1)


def test_a_read_that_was_given_up_is_late_until_it_has_come_to_an_end() -> None:
    subject = worth()
    subject.fetched(Tier.POOL, 0, math.inf, now_s=0.0)
    assert leading(subject, [Tier.POOL] * 8) == 0
    subject.fetched(Tier.POOL, 8 * MIB, 0.05, now_s=1.0)
    assert leading(subject, [Tier.POOL] * 8) == 8


def test_a_tier_that_is_late_again_and_again_is_doubted_twice_as_long_each_time() -> None:
    subject = worth(allowed=Allowance(0.1, 100_000_000), late_doubt_s=1.0)
    now_s = 0.0
    for doubt_s in (1.0, 2.0, 4.0, 8.0):
        subject.fetched(Tier.POOL, 0, 0.1, now_s)
        subject.fetched(Tier.POOL, 0, math.inf, now_s)  # the same read, told of again
        assert leading(subject, [Tier.POOL]) == 0
        assert subject.due(now_s + 0.99 * doubt_s) == []
        assert subject.due(now_s + doubt_s) == [Tier.POOL]
        now_s += doubt_s
        subject.fetched(Tier.POOL, MIB, 0.01, now_s)  # a little comes in time, with no request waiting
        assert leading(subject, [Tier.POOL]) == 1
    subject.fetched(Tier.POOL, 64 * MIB, 0.1, now_s + 100.0)
    subject.fetched(Tier.POOL, 0, 0.1, now_s + 101.0)
    assert leading(subject, [Tier.POOL]) == 0
    assert subject.due(now_s + 102.0) == [Tier.POOL]
