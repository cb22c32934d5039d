"""Choosing tokens: seeds, temperature, top-p, constraints, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine_adapter.embedded.request import GenerationRequest, SamplingParams
from engine_adapter.embedded.sampling import choose, greedy, make_generator, sample
from engine_adapter.embedded.sequence import Sequence

LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


class Only:
    """Allows the given tokens and remembers what was accepted."""

    def __init__(self, *allowed: int, vocab: int = 4) -> None:
        self.allowed, self.vocab, self.accepted = allowed, vocab, list[int]()

    def mask(self) -> torch.Tensor | None:
        mask = torch.zeros(self.vocab, dtype=torch.bool)
        mask[list(self.allowed)] = True
        return mask

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def advance_forced(self) -> list[int]:
        return []

    @property
    def finished(self) -> bool:
        return False


def sequence(params: SamplingParams, constraint: Only | None = None) -> Sequence:
    request = GenerationRequest("r", (0,), params, constraint=constraint)
    return Sequence(request, lambda event: None, 0, make_generator(params))


def draws(count: int, **params: float) -> Counter[int]:
    generator = torch.Generator().manual_seed(7)
    return Counter(sample(LOGITS, params["temperature"], params["top_p"], generator) for _ in range(count))


def test_greedy_takes_the_best_of_each_row_and_the_lowest_id_among_equals() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])) == [1, 0]


def test_draws_follow_the_probabilities() -> None:
    counts = draws(4000, temperature=1.0, top_p=1.0)
    for token_id, share in enumerate((0.5, 0.25, 0.125, 0.125)):
        assert counts[token_id] / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    sharp, flat = draws(2000, temperature=0.5, top_p=1.0), draws(2000, temperature=100.0, top_p=1.0)
    assert sharp[0] / 2000 == pytest.approx(0.25 / (0.25 + 0.0625 + 2 / 64), abs=0.04)  # squares of the shares
    assert flat[0] / 2000 == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1, 2})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert set(draws(300, temperature=1.0, top_p=top_p)) == kept


def test_a_seed_repeats_and_without_one_it_does_not() -> None:
    logits = torch.zeros(10_000)

    def several(seed: int | None) -> list[int]:
        chooser = sequence(SamplingParams(8, seed=seed))
        return [choose(chooser, logits, 0).token_id for _ in range(8)]

    assert several(3) == several(3)
    assert several(-1) == several(-1)
    assert several(3) != several(4)
    assert several(None) != several(None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_decides_among_what_it_allows(temperature: float) -> None:
    constraint = Only(1, 3)
    chooser = sequence(SamplingParams(1, temperature=temperature, seed=0), constraint)
    chosen = [choose(chooser, LOGITS, 0).token_id for _ in range(40)]
    assert set(chosen) == ({1} if temperature == 0 else {1, 3})
    assert constraint.accepted == chosen


def test_a_constraint_that_allows_nothing_or_has_another_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token"):
        choose(sequence(SamplingParams(1, temperature=0.0), Only()), LOGITS, 0)
    with pytest.raises(ValueError, match="shape"):
        choose(sequence(SamplingParams(1, temperature=0.0), Only(1, vocab=5)), LOGITS, 0)


def test_the_log_probability_is_the_models_own() -> None:
    plain = choose(sequence(SamplingParams(1, temperature=0.0, logprobs=True)), LOGITS, 0)
    masked = choose(sequence(SamplingParams(1, temperature=0.3, logprobs=True), Only(1)), LOGITS, 0)
    assert plain.logprob == pytest.approx(math.log(0.5))
    assert masked.logprob == pytest.approx(math.log(0.25))
    assert choose(sequence(SamplingParams(1, temperature=0.0)), LOGITS, 0).logprob is None
