from __future__ import annotations

import numpy as np

from radix_index.base import Knowledge
from radix_index.naive import NaiveIndex
from radix_index.predict import PredictedResidency

BLOCK = 16


def residency(capacity_blocks: int = 8, limit_blocks: int = 16) -> tuple[PredictedResidency, NaiveIndex]:
    index = NaiveIndex()
    return PredictedResidency(index, "a", BLOCK, capacity_blocks * BLOCK, limit_blocks * BLOCK), index


def answer(predicted: PredictedResidency, hashes: list[int], cached_tokens: int | None) -> None:
    predicted.answered(predicted.expect(hashes, len(hashes) * BLOCK + 1), cached_tokens)


def held(index: NaiveIndex, hashes: list[int]) -> int:
    return index.match(hashes)["a"].blocks


def test_a_prompt_counts_from_its_first_token_on() -> None:
    predicted, index = residency()
    expectation = predicted.expect([1, 2, 3], 50)
    assert held(index, [1, 2, 3]) == 0
    predicted.computed(expectation)
    assert held(index, [1, 2, 3]) == 3
    assert index.match([1])["a"].knowledge is Knowledge.STALE


def test_the_oldest_goes_first_and_suffixes_before_prefixes() -> None:
    predicted, index = residency(capacity_blocks=5)
    answer(predicted, [1, 2, 3], None)
    answer(predicted, [7, 8, 9], None)
    assert held(index, [1, 2, 3]) == 2
    assert held(index, [7, 8, 9]) == 3


def test_a_missing_block_takes_everything_older_with_it() -> None:
    predicted, index = residency()
    answer(predicted, [1, 2], 0)
    answer(predicted, [5, 6], 0)
    answer(predicted, [7, 8], 0)
    answer(predicted, [5, 6], 0)  # 5 was gone; then so are 1 and 2, but not 7 and 8
    assert [held(index, [1, 2]), held(index, [5, 6]), held(index, [7, 8])] == [0, 2, 2]
    assert predicted.stats.shortened == 1
    assert predicted.capacity_blocks == (8 + 2) // 2


def test_more_than_predicted_extends_the_capacity_up_to_the_limit() -> None:
    predicted, index = residency(capacity_blocks=2, limit_blocks=3)
    answer(predicted, [1, 2, 3, 4], 0)
    assert held(index, [1, 2, 3, 4]) == 2
    answer(predicted, [1, 2, 3, 4], 4 * BLOCK)
    assert held(index, [1, 2, 3, 4]) == 3
    assert predicted.stats.extended == 1


def test_blocks_computed_while_a_request_was_on_its_way_do_not_extend_the_capacity() -> None:
    predicted, _ = residency()
    first, second = predicted.expect([1, 2], 40), predicted.expect([1, 2, 3], 50)
    predicted.computed(first)
    predicted.answered(second, 2 * BLOCK)
    assert predicted.capacity_blocks == 8
    assert predicted.stats.mean_error_tokens == -2 * BLOCK


def test_the_last_token_is_never_expected_to_be_cached() -> None:
    predicted, _ = residency()
    answer(predicted, [1, 2], 0)
    predicted.answered(predicted.expect([1, 2], 2 * BLOCK), BLOCK)
    assert (predicted.stats.exact, predicted.stats.error_tokens) == (2, 0)


def test_a_restart_clears_and_answers_of_the_former_life_are_ignored() -> None:
    predicted, index = residency()
    answer(predicted, [1, 2], 0)
    late = predicted.expect([1, 2, 3], 50)
    predicted.restarted()
    predicted.answered(late, 2 * BLOCK)
    assert held(index, [1, 2, 3]) == 0
    assert predicted.stats.answers == 1


def test_arrays_of_hashes_are_taken_and_the_statistics_say_how_far_off() -> None:
    predicted, _ = residency()
    hashes = np.array([2**64 - 1, 5], dtype=np.uint64)
    predicted.answered(predicted.expect(hashes, 40), 0)
    predicted.answered(predicted.expect(hashes, 40), 10)
    assert predicted.stats.error_tokens == 2 * BLOCK - 10
    assert predicted.stats.exact_share == 0.5
