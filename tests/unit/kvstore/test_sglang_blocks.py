from __future__ import annotations

import struct
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvstore.block import content_hashes, event_hash, token_bytes
from kvstore.event_wire import encode_sglang
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch
from kvstore.page import PageMeta, Tier
from kvstore.plugins.sglang.blocks import BlockBook, storage_root
from tests.samples.sglang_host import CAPTURES

TOKENS = list(range(100, 164))


def told(tokens: list[int], *, salt: str | None = None, first: int = 0, **more: str) -> bytes:
    """Return the batch in which an engine tells of these blocks, from block ``first`` on."""
    names = [event_hash(digest) for digest in content_hashes(tokens, 16, salt=salt)]
    parent = names[first - 1] if first else None
    event = BlocksStored(tuple(names[first:]), parent, tuple(tokens[16 * first :]), 16, Tier.DEVICE, salt, **more)
    return encode_sglang(EventBatch(0, 1.0, (event,)))


def digests(tokens: list[int], salt: str | None = None) -> list[bytes]:
    return content_hashes(tokens, 16, parent=storage_root(salt))


def recorded_payloads(path: Path) -> list[bytes]:
    data, frames, at = path.read_bytes(), [], 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        frames.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return frames[2::3]


def test_the_chain_of_a_salt_begins_as_sglangs_does() -> None:
    # storage_namespace_seed(None, "tenant-a") of SGLang 0.5.23
    assert storage_root("tenant-a").hex() == "9d303df3761a7561353e2ae7459eb4ab12a08abb37951b696aa4f0c059c7caaa"
    assert storage_root(None) == b""
    assert storage_root("") != b""


@pytest.mark.parametrize("salt", [None, "tenant-a"])
def test_events_tell_the_tokens_of_storage_keys(salt: str | None) -> None:
    book = BlockBook()
    assert book.learn(told(TOKENS, salt=salt))
    keys = digests(TOKENS, salt)
    assert book.lookup(keys) == [
        PageMeta(parent, token_bytes(TOKENS[16 * at : 16 * at + 16]), salt)
        for at, (parent, _) in enumerate(pairwise([None, *keys]))
    ]


def test_a_chain_that_goes_on_is_followed() -> None:
    book = BlockBook()
    book.learn(told(TOKENS[:32], salt="s"))
    book.learn(told(TOKENS, salt="s", first=2))
    found = book.lookup(digests(TOKENS, "s"))
    assert all(meta is not None for meta in found)


def test_blocks_that_are_told_of_again_stay_the_longest() -> None:
    book = BlockBook(blocks=6)
    book.learn(told(TOKENS))
    book.learn(told(list(range(1000, 1032))))
    book.learn(told(TOKENS))
    book.learn(told(list(range(2000, 2032))))
    assert None not in book.lookup(digests(TOKENS))
    assert book.lookup(digests(list(range(1000, 1032)))) == [None] * 2


def test_what_hangs_on_an_unknown_block_stays_unknown() -> None:
    book = BlockBook()
    assert book.learn(told(TOKENS, first=2))
    assert book.lookup(digests(TOKENS)) == [None] * 4
    assert book.unnamed == 2


def test_blocks_of_adapters_are_left_out() -> None:
    book = BlockBook()
    book.learn(told(TOKENS, adapter="lora"))
    assert (len(book), book.unnamed) == (0, 4)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [{"no": "type"}]]),
     msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]), msgspec.msgpack.encode([1.0, [7]])],
)  # fmt: skip
def test_what_cannot_be_understood_is_told_and_harms_nothing(payload: bytes) -> None:
    book = BlockBook()
    assert not book.learn(payload)
    assert book.learn(told(TOKENS))


def test_other_events_and_odd_blocks_are_passed_over() -> None:
    book = BlockBook()
    removed = encode_sglang(EventBatch(0, 1.0, (BlocksRemoved((1, 2), Tier.DEVICE),)))
    assert book.learn(removed)
    stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 2}
    for tokens in ([], [1], [[1, 2], [2, 3]]):
        assert book.learn(msgspec.msgpack.encode([1.0, [{**stored, "token_ids": tokens}]]))
    assert len(book) == 0


def test_older_versions_write_arrays() -> None:
    book = BlockBook()
    names = [event_hash(digest) for digest in content_hashes(TOKENS, 16, salt="s")]
    event = ["BlockStored", names, None, TOKENS, 16, None, "GPU", {"cache_salt": "s"}]
    assert book.learn(msgspec.msgpack.encode([1.0, [event, ["AllBlocksCleared"]]]))
    assert None not in book.lookup(digests(TOKENS, "s"))


def test_the_oldest_are_forgotten() -> None:
    book = BlockBook(blocks=4)
    book.learn(told(TOKENS))
    other = list(range(1000, 1032))
    book.lookup(digests(TOKENS)[:1])  # used: it stays
    book.learn(told(other))
    first, *rest = book.lookup(digests(TOKENS))
    assert first is not None
    assert rest.count(None) == 2
    assert None not in book.lookup(digests(other))
    assert len(book) == 4


def test_a_lookup_waits_for_an_event_on_its_way() -> None:
    book = BlockBook()
    teller = threading.Timer(0.05, book.learn, [told(TOKENS)])
    teller.start()
    assert None not in book.lookup(digests(TOKENS), wait_s=30.0)
    teller.join()


@pytest.mark.parametrize("name", ["sglang_kv_events_page16_0.5.23.bin", "sglang_kv_events_hicache_0.5.23.bin"])
def test_recorded_events_of_the_real_engine_name_their_blocks(name: str) -> None:
    book = BlockBook(blocks=1_000_000)
    payloads = recorded_payloads(CAPTURES / name)
    assert all(book.learn(payload) for payload in payloads)
    assert len(book) > 20
    assert book.unnamed <= len(book) // 5  # the recorder joined late
