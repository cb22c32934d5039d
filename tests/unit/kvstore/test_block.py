"""Block hashes: recomputed over an engine's own recorded events, and their algebra."""

from __future__ import annotations

import pytest

from kvstore.block import content_hashes, event_hash, routing_hashes, routing_seed, token_bytes
from tests.captured_events import SGLANG, captured_frames, wire_events

EXPECTED = dict(zip(SGLANG, [(16, 1, 1), (590, 0, 0), (461, 66, 58), (7283, 66, 61)], strict=True))
"""Of each recording: blocks, salted chains, chains that continue an earlier event's."""


@pytest.mark.parametrize("recording", SGLANG)
def test_content_hashes_are_the_names_that_sglang_gives_its_blocks(recording: str) -> None:
    chains: dict[int, bytes] = {}  # an engine's name for a block -> our digest of it
    checked = salted = continued = 0
    for _, payload in captured_frames(recording):
        for event in wire_events(payload):
            if event["type"] != "BlockStored":
                continue
            parent_name = event["parent_block_hash"]
            if parent_name is not None and parent_name not in chains:
                continue  # the recorder missed the frame that began this chain
            parent = None if parent_name is None else chains[parent_name]
            salt = event.get("cache_salt")
            digests = content_hashes(event["token_ids"], event["block_size"], salt=salt, parent=parent)
            assert [event_hash(digest) for digest in digests] == event["block_hashes"]
            chains.update(zip(event["block_hashes"], digests, strict=True))
            checked += len(digests)
            salted += salt is not None
            continued += parent is not None
    assert (checked, salted, continued) == EXPECTED[recording]


def test_a_chain_continues_from_its_parent() -> None:
    whole = content_hashes(range(40), 4, salt="s")
    assert content_hashes(range(20, 40), 4, parent=whole[4]) == whole[5:]
    seed = routing_seed("model", salt="s")
    routed = routing_hashes(range(40), 4, seed)
    assert routing_hashes(range(20, 40), 4, seed, parent=routed[4]) == routed[5:]


def test_a_partial_block_has_no_name() -> None:
    assert len(content_hashes(range(11), 4)) == len(routing_hashes(range(11), 4, 0)) == 2
    assert content_hashes([], 4) == []


def test_whatever_separates_caches_changes_every_name() -> None:
    prompts = [content_hashes(range(8), 4, salt=salt) for salt in (None, "a", "b")]
    assert len({name for names in prompts for name in names}) == 6
    assert content_hashes(range(8), 4, salt="") == prompts[0]
    seeds = {routing_seed(*of) for of in [("m",), ("m", "x"), ("m", None, "x"), ("mx",), ("m", "x", "y"), ("m", "xy")]}
    assert len(seeds) == 6


def test_routing_hashes_never_change() -> None:
    # Gateways of different versions must agree, and snapshots hold them: bump ROUTING_HASH_VERSION with this.
    assert routing_hashes(range(8), 4, routing_seed("m", "a", "s")) == [10479514714679792855, 7066091908515476873]


def test_ids_that_do_not_fit_are_refused() -> None:
    assert token_bytes([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    with pytest.raises(OverflowError):
        token_bytes([-1])
    with pytest.raises(OverflowError):
        token_bytes([2**32])
