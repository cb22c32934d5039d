"""Agreement: one request decides nothing, a share of many does, and trust comes back."""

from __future__ import annotations

import pytest

from gateway.agreement import Agreement, AgreementOptions


def answers(agreement: Agreement, *, agreeing: int = 0, disagreeing: int = 0) -> int:
    """Take answers in; return how often the verdict changed."""
    given = [True] * agreeing + [False] * disagreeing
    return sum(agreement.answered("m", agrees=agrees) for agrees in given)


def test_a_model_that_nobody_asked_is_trusted() -> None:
    assert Agreement().is_trusted("m")
    assert Agreement().state("m").disagreement_rate == 0


@pytest.mark.parametrize("before", [0, 1, 15, 63, 200])
def test_no_single_answer_takes_trust_away(before: int) -> None:
    agreement = Agreement()
    answers(agreement, agreeing=before)
    assert answers(agreement, disagreeing=1) == 0
    assert agreement.is_trusted("m")


def test_a_wrong_template_is_found_after_the_least_number_of_answers() -> None:
    agreement = Agreement(AgreementOptions(least_answers=16))
    assert answers(agreement, disagreeing=15) == 0
    assert answers(agreement, disagreeing=1) == 1
    assert not agreement.is_trusted("m")
    assert agreement.state("m").disagreement_rate == 1


def test_a_rate_below_the_threshold_keeps_trust() -> None:
    agreement = Agreement()
    for _ in range(40):
        assert answers(agreement, agreeing=4, disagreeing=1) == 0
    assert agreement.is_trusted("m")
    assert agreement.state("m").disagreement_rate == pytest.approx(0.2, abs=0.02)


def test_trust_comes_back_when_the_window_agrees_and_not_before() -> None:
    agreement = Agreement()
    answers(agreement, disagreeing=64)
    assert answers(agreement, agreeing=60) == 0
    assert not agreement.is_trusted("m")
    assert answers(agreement, agreeing=1) == 1
    assert agreement.is_trusted("m")


def test_models_are_judged_apart_and_can_begin_anew() -> None:
    agreement = Agreement()
    answers(agreement, disagreeing=20)
    assert agreement.is_trusted("other")
    agreement.forget("m")
    assert agreement.is_trusted("m")
    assert agreement.state("m").answers == 0


@pytest.mark.parametrize(
    "options",
    [
        {"distrust_share": 0.05},
        {"least_answers": 100},
        {"least_answers": 4},
        {"least_answers": 1, "distrust_share": 1.0},
    ],
)
def test_options_by_which_one_answer_could_decide_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"answer|window"):
        AgreementOptions(**options)  # type: ignore[arg-type]
