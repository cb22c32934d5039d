from __future__ import annotations

import pytest

from gateway.page_advice import LARGE_ENOUGH, RECOMMENDED, advice, measure


def test_a_token_costs_the_index_as_much_more_as_pages_are_smaller() -> None:
    bytes_of = {size: measure(size).index_bytes for size in (1, 16, 64)}
    assert 8 < bytes_of[1] / bytes_of[16] < 32
    assert bytes_of[16] > bytes_of[64] > 0


@pytest.mark.parametrize("size", [LARGE_ENOUGH, 32, 256])
def test_good_pages_need_no_advice(size: int) -> None:
    assert advice(size) is None


def test_small_pages_are_told_what_they_cost_and_what_others_would() -> None:
    told = advice(1)
    assert told is not None
    assert told.startswith("its pages hold 1 token, which costs here ")
    assert all(f"--page-size {size} (" in told for size in RECOMMENDED)
