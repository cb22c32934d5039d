"""What a client is told to wait that finds nobody."""

from __future__ import annotations

import math
import random

import pytest

from gateway.absence import LONGEST_S, Absence, retry_after_s, until_probe_s


def test_a_first_start_is_expected_to_take_as_long_again() -> None:
    absence = Absence(100.0)
    assert [absence.rest_s(now) for now in (100.0, 104.0, 120.0)] == [0.0, 4.0, 20.0]


def test_a_restart_is_expected_to_take_as_long_as_the_last_one() -> None:
    absence = Absence(0.0)
    absence.returned(12.0)
    assert absence.rest_s(13.0) == 0.0
    absence.left(50.0)
    absence.left(51.0)  # a second probe finds it away, too
    assert absence.rest_s(52.0) == 10.0
    assert absence.rest_s(63.0) == 13.0  # longer than ever


def test_being_found_again_and_again_is_no_absence() -> None:
    absence = Absence(0.0)
    absence.returned(5.0)
    absence.returned(9.0)
    absence.left(10.0)
    assert absence.rest_s(10.0) == 5.0


@pytest.mark.parametrize(
    ("rests", "told"),
    [([], LONGEST_S), ([math.inf], LONGEST_S), ([7.2, 30.0], 10), ([0.0], 2), ([400.0], LONGEST_S)],
)
def test_the_soonest_return_is_told_in_whole_seconds(rests: list[float], told: int) -> None:
    assert retry_after_s(rests, 2.0) == told
    assert retry_after_s([0.0], 0.05) == 1


def test_a_probe_that_was_silent_has_been_the_wait_for_the_next_one() -> None:
    """So an instance that comes back is found within one interval, whatever the probe before it waited for."""
    for seed in range(50):
        chance = random.Random(seed)
        refused_s = until_probe_s(2.0, 0.0, chance, is_there=False)
        silent_s = until_probe_s(2.0, 2.0, chance, is_there=False)
        assert 1.0 <= refused_s <= 1.6
        assert 0 < silent_s <= 0.1
        assert 1.6 <= until_probe_s(2.0, 5.0, chance, is_there=True) <= 2.0
