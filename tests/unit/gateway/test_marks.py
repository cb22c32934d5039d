"""Marks of prompts: the same for equal prefixes, other ones otherwise, and bounded."""

from __future__ import annotations

import pytest

from gateway.marks import MAX_MARKS, STRIDE_TOKENS, prefix_marks
from gateway.prompts import Prompt
from kvstore.block import routing_hash_array, routing_seed
from tracing.messages import message_chain


def prompt(tokens: list[int], *sizes: int, exact: bool = True, salt: str | None = None) -> Prompt:
    seed = routing_seed("m", None, salt)
    return Prompt(len(tokens), {size: routing_hash_array(tokens, size, seed) for size in sizes}, is_exact=exact)  # type: ignore[misc]


@pytest.mark.parametrize("size", [1, 16, 48, 64, 256])
def test_marks_stand_at_whole_blocks_and_name_what_is_before_them(size: int) -> None:
    first, second = list(range(2000)), [*range(1500), 9, *range(1501, 2000)]
    one, other = (prefix_marks(prompt(tokens, size), ()) for tokens in (first, second))
    assert one is not None
    assert other is not None
    assert one.stride_tokens % size == 0
    assert STRIDE_TOKENS <= one.stride_tokens < STRIDE_TOKENS + size or one.stride_tokens == size
    assert len(one.marks()) == 2000 // one.stride_tokens
    same = 1500 // one.stride_tokens
    assert one.marks()[:same] == other.marks()[:same]
    assert set(one.marks()[same:]).isdisjoint(other.marks()[same:])


def test_the_smallest_blocks_count_and_other_namespaces_have_other_marks() -> None:
    tokens = list(range(1000))
    assert prefix_marks(prompt(tokens, 256, 16), ()) == prefix_marks(prompt(tokens, 16), ())
    assert prefix_marks(prompt(tokens, 16), ()) != prefix_marks(prompt(tokens, 16, salt="s"), ())


def test_long_prompts_are_cut_and_say_so() -> None:
    marks = prefix_marks(prompt(list(range(STRIDE_TOKENS * (MAX_MARKS + 3))), 16), ())
    assert marks is not None
    assert (len(marks.marks()), marks.is_cut) == (MAX_MARKS, True)
    assert len(marks.hashes) == 8 * MAX_MARKS


def test_what_is_not_known_has_no_marks() -> None:
    assert prefix_marks(None, ()) is None
    assert prefix_marks(prompt([1, 2, 3], 16, exact=False), ()) is None
    assert prefix_marks(prompt([1, 2, 3]), ()) is None
    chain = message_chain([{"role": "user", "content": "hello"}])
    short = prefix_marks(prompt([1, 2, 3], 16), chain)
    assert short is not None
    assert (short.marks(), short.digest) == ((), chain[-1].digest.hex())
