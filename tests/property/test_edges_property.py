"""Branches are found by the bytes that a text takes, whatever their number, and however alike they are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.edges import Edges, Key

# Elements of an array end where they end whatever follows, so no branch begins another one: here by their last byte.
WORDS = st.lists(st.sampled_from([b"a", b"ab", b"task: " * 5, b"x" * 40]), max_size=6).map(lambda w: b"".join(w) + b"}")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WORDS, st.booleans()), max_size=40), WORDS, st.booleans())
def test_the_branch_that_a_text_takes_is_found(changes: list[tuple[bytes, bool]], asked: bytes, goes_on: bool) -> None:
    edges, oracle = Edges[int](), dict[bytes, int]()
    for number, (branch, is_added) in enumerate(changes):
        key = Key.of(memoryview(branch))
        assert (edges.get(key) is not None) == (branch in oracle)
        if is_added and branch not in oracle:
            edges.put(key, number)
            oracle[branch] = number
        elif not is_added and branch in oracle:
            edges.remove(key)
            del oracle[branch]
        assert len(edges) == len(oracle)
        for word in {*oracle, asked, branch}:
            text = b"before" + word + (b", more" if goes_on else b"")
            assert edges.ahead(memoryview(text), len(b"before")) == (oracle.get(word) if goes_on else None)
