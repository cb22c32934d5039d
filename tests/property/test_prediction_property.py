"""Predictions held against an engine that is an LRU cache over prefixes."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.page import Tier
from radix_index.naive import NaiveIndex
from radix_index.predict import PredictedResidency

BLOCK = 4


class LruEngine:
    """A prefix cache of ``capacity`` blocks that tells how many prompt tokens were cached."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: OrderedDict[int, None] = OrderedDict()

    def serve(self, hashes: list[int], prompt_tokens: int) -> int:
        """Compute a prompt; return its cached tokens."""
        hit = 0
        while hit < len(hashes) and hashes[hit] in self.used:
            hit += 1
        for block in reversed(hashes):
            self.used[block] = None
            self.used.move_to_end(block)
        while len(self.used) > self.capacity:
            self.used.popitem(last=False)
        return min(hit, (prompt_tokens - 1) // BLOCK) * BLOCK


def chain(path: list[int]) -> list[int]:
    """Return one hash for each block; equal paths have equal hashes."""
    hashes, value = [], 1
    for step in path:
        value = (value * 31 + step + 1) % (1 << 61)
        hashes.append(value)
    return hashes


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=60)


def drive(predicted: PredictedResidency, engine: LruEngine, path: list[int], tail: int) -> tuple[int, int]:
    """Send one prompt; return predicted and reported cached tokens."""
    hashes = chain(path)
    tokens = len(hashes) * BLOCK + tail
    expectation = predicted.expect(hashes, tokens)
    cached = engine.serve(hashes, tokens)
    predicted.answered(expectation, cached)
    return min(expectation.blocks, (tokens - 1) // BLOCK) * BLOCK, cached


@given(PATHS, st.integers(5, 20), st.integers(0, 15), st.integers(0, 3))
def test_predictions_of_an_lru_engine_err_on_one_side_and_only_so_often(
    paths: list[list[int]], capacity: int, excess: int, tail: int
) -> None:
    predicted = PredictedResidency(NaiveIndex(), "a", BLOCK, (capacity + excess) * BLOCK)
    engine = LruEngine(capacity)
    for path in paths:
        guess, cached = drive(predicted, engine, path, tail)
        assert guess >= cached
        assert predicted.capacity_blocks >= capacity
        predicted.check()
    assert predicted.stats.extended == 0
    assert predicted.stats.shortened <= excess
    if excess == 0:
        assert predicted.stats.exact == len(paths)


@given(PATHS, st.integers(5, 20), st.integers(1, 40), st.integers(1, 40))
def test_only_what_was_routed_is_predicted_and_memory_is_bounded(
    paths: list[list[int]], capacity: int, declared: int, limit: int
) -> None:
    index = NaiveIndex()
    predicted = PredictedResidency(index, "a", BLOCK, declared * BLOCK, limit_tokens=limit * BLOCK)
    engine = LruEngine(capacity)
    routed: set[int] = set()
    for path in paths:
        routed |= set(chain(path))
        drive(predicted, engine, path, 1)
        predicted.check()
        assert predicted.blocks <= limit
        assert index.stats().blocks == predicted.blocks
        known = [block for block in routed if sum(index.match([block], ["a"])["a"].tier_blocks)]
        assert len(known) == predicted.blocks


@given(PATHS, st.integers(6, 20), st.integers(1, 5))
@settings(max_examples=50)
def test_an_underestimated_engine_is_believed_in_the_end(paths: list[list[int]], capacity: int, declared: int) -> None:
    predicted = PredictedResidency(NaiveIndex(), "a", BLOCK, declared * BLOCK, limit_tokens=30 * BLOCK)
    engine = LruEngine(capacity)
    working_set = [
        path for path in paths if len({h for p in [*paths[: paths.index(path)], path] for h in chain(p)}) <= 6
    ]
    for path in working_set * 8:
        drive(predicted, engine, path, 1)
    errors = [guess - cached for guess, cached in (drive(predicted, engine, path, 1) for path in working_set)]
    assert errors == [0] * len(errors)


@given(PATHS, st.integers(5, 20))
def test_after_a_flush_that_nobody_told_of_predictions_come_back(paths: list[list[int]], capacity: int) -> None:
    predicted = PredictedResidency(NaiveIndex(), "a", BLOCK, capacity * BLOCK)
    engine = LruEngine(capacity)
    for path in paths:
        drive(predicted, engine, path, 1)
    engine.used.clear()
    last = paths[-1]
    for _ in range(2):
        drive(predicted, engine, last, 1)
    guess, cached = drive(predicted, engine, last, 1)
    assert guess == cached


def test_tier_of_a_prediction_is_the_device() -> None:
    index = NaiveIndex()
    predicted = PredictedResidency(index, "a", BLOCK, 40)
    drive(predicted, LruEngine(10), [1, 2, 0], 1)
    assert index.match(chain([1, 2, 0]))["a"].tier_blocks[Tier.DEVICE] == 3
