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


def test_an_answer_leaves_a_tail_that_the_next_step_is_expected_to_find() -> None:
    predicted, index = residency(capacity_blocks=16, limit_blocks=32)
    first = predicted.expect([1, 2], 2 * BLOCK + 5)
    predicted.answered(first, 0, output_tokens=2 * BLOCK)  # 5 + 32 - 1 tokens lie behind the two full blocks
    following = predicted.expect([1, 2, 3, 4, 5, 6], 6 * BLOCK + 1)
    assert (following.blocks, following.tail_blocks) == (2, 2)
    assert held(index, [1, 2, 3, 4, 5, 6]) == 2  # what is not named is not claimed
    predicted.answered(following, 4 * BLOCK)
    assert predicted.stats.exact_share == 1.0
    assert predicted.capacity_blocks == 16
    again = predicted.expect([1, 2, 30, 40], 4 * BLOCK + 1)
    assert again.tail_blocks == 0  # its blocks have names by now


def test_a_tail_that_is_not_found_is_an_error_and_no_eviction() -> None:
    predicted, index = residency(capacity_blocks=16, limit_blocks=32)
    predicted.answered(predicted.expect([1, 2], 2 * BLOCK + 5), 0, output_tokens=2 * BLOCK)
    predicted.answered(predicted.expect([1, 2, 9, 10], 4 * BLOCK + 1), 2 * BLOCK)
    assert (predicted.stats.exact, predicted.stats.error_tokens) == (1, 2 * BLOCK)
    assert predicted.capacity_blocks == 16
    assert held(index, [1, 2, 9, 10]) == 4


def test_a_tail_goes_with_the_block_that_it_hangs_on() -> None:
    predicted, _ = residency(capacity_blocks=4, limit_blocks=8)
    predicted.answered(predicted.expect([1, 2], 2 * BLOCK + 5), 0, output_tokens=4 * BLOCK)
    predicted.answered(predicted.expect([5, 6, 7, 8], 4 * BLOCK + 1), 0)
    predicted.check()
    assert predicted.tail_blocks([1, 2, 3], 2) == 0


def test_text_is_scaled_scored_apart_and_believed_with_a_margin() -> None:
    predicted, index = residency(capacity_blocks=16, limit_blocks=32)
    chunks = list(range(1, 13))
    first = predicted.expect(chunks, 12 * BLOCK + 1, is_approximate=True)
    predicted.answered(first, 0, prompt_tokens=270)  # it has more and shorter tokens than was assumed
    second = predicted.expect(chunks, 12 * BLOCK + 1, is_approximate=True)
    predicted.answered(second, 256, prompt_tokens=270)
    assert predicted.stats.answers == 0
    assert predicted.approximate_stats.exact_share == 1.0
    third = predicted.expect(chunks, 12 * BLOCK + 1, is_approximate=True)
    predicted.answered(third, 200, prompt_tokens=270)  # three chunks fewer prove nothing
    assert held(index, chunks) == 12
    assert predicted.approximate_stats.exact == 2
    fourth = predicted.expect(chunks, 12 * BLOCK + 1, is_approximate=True)
    predicted.answered(fourth, 0, prompt_tokens=270)  # none at all does
    assert predicted.capacity_blocks < 16
