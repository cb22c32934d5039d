from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.console.scale import TimeScale, token_bar

S = 10**9


@given(st.lists(st.integers(0, 10**6), min_size=8, max_size=8))
def test_a_bar_to_scale_of_its_own_total_is_filled_and_has_no_gaps(counts: list[int]) -> None:
    bar = token_bar(counts, sum(counts))
    assert len(bar) == sum(number > 0 for number in counts)
    at = 0.0
    for segment in bar:
        assert abs(float(segment.x[:-1]) - at) < 0.1
        at += float(segment.width[:-1])
    assert not bar or abs(at - 100) < 0.1


def test_a_bar_is_to_the_scale_it_is_given() -> None:
    device, fresh = token_bar((50, 0, 0, 0, 0, 50, 0, 0), 400)
    assert (device.x, device.width, device.kind) == ("0.00%", "12.50%", "device")
    assert (fresh.x, fresh.width, fresh.kind) == ("12.50%", "12.50%", "fresh")
    assert device.title == "Device: 50 tokens (50%), read from the accelerator's memory"


def test_an_axis_without_idle_time_is_linear() -> None:
    clock = TimeScale([(0, 4 * S), (3 * S, 10 * S)])
    assert [clock.at(ns) for ns in (-S, 0, 5 * S, 10 * S, 99 * S)] == [0.0, 0.0, 50.0, 100.0, 100.0]
    assert clock.cuts == []


def test_a_long_idle_stretch_is_cut_to_a_third_of_the_work() -> None:
    clock = TimeScale([(0, 3 * S), (1000 * S, 1003 * S)])
    assert clock.cuts == [(3 * S, 1000 * S)]
    assert clock.at(3 * S) == 100 * 3 / 8
    assert clock.at(1000 * S) == 100 * 5 / 8


def test_ticks_are_round_uncrowded_and_not_inside_a_cut() -> None:
    clock = TimeScale([(0, 3 * S), (1000 * S, 1003 * S)])
    ticks = clock.ticks()
    assert ticks[0].label == "0"
    assert {"2 s"} <= {tick.label for tick in ticks}
    assert all(not 37.6 < float(tick.x[:-1]) < 62.4 for tick in ticks)
    places = [float(tick.x[:-1]) for tick in ticks]
    assert all(b - a >= 13 for a, b in pairwise(places))


def test_a_moment_can_be_seen_when_it_must_and_stays_on_the_axis() -> None:
    clock = TimeScale([(0, 1000 * S)])
    assert clock.segment("tool", 5 * S, 5 * S, "").width == "0.00%"
    seen = clock.segment("tool", 1000 * S, 1000 * S, "", seen=True)
    assert (seen.x, seen.width) == ("99.60%", "0.40%")


def test_long_axes_count_in_minutes_and_hours() -> None:
    assert [tick.label for tick in TimeScale([(0, 180 * S)]).ticks()] == ["0", "30 s", "1:00", "1:30", "2:00", "2:30"]
    assert [tick.label for tick in TimeScale([(0, 4 * 3600 * S)]).ticks()] == ["0", "1:00:00", "2:00:00", "3:00:00"]


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**10)), min_size=1, max_size=20))
def test_the_axis_is_monotonic_and_ends_at_both_ends(spans: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in spans]
    clock = TimeScale(intervals)
    moments = sorted(moment for interval in intervals for moment in interval)
    places = [clock.at(moment) for moment in moments]
    assert places == sorted(places)
    assert places[0] == 0.0
    assert places[-1] == 100.0 or moments[0] == moments[-1]
    assert len(clock.ticks()) <= 12


def test_an_axis_of_nothing_has_no_ticks() -> None:
    assert TimeScale([]).ticks() == ()
    assert TimeScale([]).at(5) == 0.0
