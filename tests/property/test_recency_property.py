"""``radix_index.recency`` against an ordered dictionary that is moved about in block by block."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_index.kernels import COMPILED
from radix_index.recency import Recency

CHAINS = st.lists(st.integers(1, 60), min_size=0, max_size=25)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), CHAINS),
        st.tuples(st.just("pop"), st.integers(0, 30)),
        st.tuples(st.just("until"), st.integers(0, 12)),
    ),
    max_size=40,
)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.skipif(not COMPILED, reason="built"))]
)
@given(steps=STEPS)
def test_the_order_is_that_of_an_ordered_dictionary(compiled: bool, steps: list[tuple[str, object]]) -> None:
    recency, model, clock = Recency(compiled=compiled), OrderedDict[int, int](), 0
    for action, value in steps:
        if action == "touch":
            clock += 1
            blocks = list(dict.fromkeys(value))  # type: ignore[call-overload]  # a chain's hashes differ
            before = recency.touch(np.array(blocks, np.uint64), clock)
            assert before.tolist() == [model.get(block, 0) for block in blocks]
            for block in reversed(blocks):
                model[block] = clock
                model.move_to_end(block)
        else:
            last = max(clock - int(value), 0)  # type: ignore[call-overload]
            count = int(value) if action == "pop" else sum(use <= last for use in model.values())  # type: ignore[call-overload]
            expected = [model.popitem(last=False)[0] for _ in range(min(count, len(model)))]
            gone = recency.pop_oldest(count) if action == "pop" else recency.pop_until(last)
            assert gone.tolist() == expected
        recency.check()
        assert len(recency) == len(model)
        every = np.arange(1, 61, dtype=np.uint64)
        assert recency.uses(every).tolist() == [model.get(block, 0) for block in range(1, 61)]


def test_a_prompt_sent_again_and_again_takes_no_more_room() -> None:
    recency, blocks = Recency(), np.arange(1, 5001, dtype=np.uint64)
    for clock in range(1, 200):
        recency.touch(blocks, clock)
        assert recency._queued <= 4 * len(blocks) + (1 << 14) + len(blocks)
    recency.check()


def test_a_block_that_stands_twice_in_a_prompt_goes_once() -> None:
    recency = Recency()
    recency.touch(np.array([7, 8, 7], np.uint64), 1)
    assert len(recency) == 2
    assert sorted(recency.pop_oldest(5).tolist()) == [7, 8]
    recency.check()
