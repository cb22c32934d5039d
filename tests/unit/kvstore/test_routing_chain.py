"""The routing chain, compiled and not, against the hash library called block by block."""

from __future__ import annotations

from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import block
from kvstore.block import routing_hash_array, routing_hashes

ids = st.integers(0, 2**32 - 1)


def by_hand(tokens: list[int], size: int, seed: int) -> list[int]:
    hashes, previous = [], seed
    for start in range(0, len(tokens) - size + 1, size):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + size])
        previous = xxhash.xxh3_64_intdigest(data, previous)
        hashes.append(previous)
    return hashes


@pytest.fixture(params=["compiled", "interpreted"])
def chain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "interpreted":
        monkeypatch.setattr(block, "_compiled", None)


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("size", [*range(1, 62), 64, 100, 256])
def test_every_block_size_gives_the_library_s_hashes(size: int) -> None:
    tokens = [(7919 * n * n + 104729) % 2**32 for n in range(size * 70 + size // 2)]
    assert routing_hashes(tokens, size, 2**64 - 3) == by_hand(tokens, size, 2**64 - 3)


@given(st.lists(ids, max_size=100), st.integers(1, 70), st.integers(0, 2**64 - 1))
def test_any_tokens_give_the_library_s_hashes(tokens: list[int], size: int, seed: int) -> None:
    assert routing_hashes(tokens, size, seed) == by_hand(tokens, size, seed)
    assert routing_hash_array(array("I", tokens), size, seed).tolist() == by_hand(tokens, size, seed)


@given(st.lists(ids, min_size=40, max_size=40), st.integers(0, 10))
def test_a_chain_goes_on_from_its_parent(tokens: list[int], cut: int) -> None:
    whole = routing_hashes(tokens, 4, 9)
    parent = whole[cut - 1] if cut else None
    assert routing_hashes(tokens[4 * cut :], 4, 9, parent=parent) == whole[cut:]
