"""How many prompt tokens a step of the embedded engine takes beside streams that wait."""

from __future__ import annotations

import pytest

from engine_adapter.embedded.pace import Pace, PaceOptions

OPTIONS = PaceOptions(limit_s=0.5, most_tokens=128, least_tokens=16)


def drive(pace: Pace, token_s: float, decode_s: float, steps: int = 40) -> int:
    """Let a machine of this speed take what it is given; return what it is given in the end."""
    for _ in range(steps):
        tokens = pace.mixed_tokens()
        pace.took(tokens, 25, decode_s + tokens * token_s)
        pace.took(0, 25, decode_s)
    return pace.mixed_tokens()


@pytest.mark.parametrize(
    ("token_s", "decode_s", "tokens"),
    [(0.0001, 0.01, 128), (0.005, 0.1, 80), (0.02, 0.1, 20), (0.02, 0.4, 16), (0.001, 2.0, 16)],
)
def test_a_step_takes_what_its_time_allows(token_s: float, decode_s: float, tokens: int) -> None:
    assert abs(drive(Pace(OPTIONS), token_s, decode_s) - tokens) <= 1


def test_it_follows_a_machine_that_gets_busy_and_idle_again() -> None:
    pace = Pace(OPTIONS)
    assert drive(pace, 0.001, 0.01) == 128
    assert drive(pace, 0.02, 0.1) == 20
    assert drive(pace, 0.001, 0.01) == 128


def test_nothing_is_known_at_first_and_a_short_slow_prompt_says_little() -> None:
    pace = Pace(OPTIONS)
    assert pace.mixed_tokens() == 128
    pace.took(4, 0, 1.0)  # what warms everything up
    pace.took(512, 0, 0.5)
    assert pace.mixed_tokens() > 100


def test_a_limit_below_the_least_holds() -> None:
    pace = Pace(PaceOptions(limit_s=0.5, most_tokens=7))
    pace.took(7, 3, 10.0)
    assert pace.mixed_tokens() == 7
