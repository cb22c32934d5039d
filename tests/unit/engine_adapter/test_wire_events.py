"""The decoder of KV events: recorded frames of real engines, every shape in the version table, and nonsense."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_adapter import unpack
from engine_adapter.wire_events import WireError, decode_batch
from kvstore.block import content_hashes, event_hash
from kvstore.event_wire import encode_sglang
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, KvEvent, TierCleared
from kvstore.page import Tier
from tests.captured_events import SGLANG, VLLM, captured_frames, wire_events

U64 = 2**64 - 1


@pytest.fixture(autouse=True, params=["compiled", "interpreted"])
def msgpack_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with both readers of msgpack, where both are there."""
    if request.param == "interpreted":
        monkeypatch.setattr("engine_adapter.wire_events.unpack", unpack.INTERPRETED)


def payload(*events: object, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), rank])


def decoded(*events: object) -> tuple[KvEvent, ...]:
    return plain(decode_batch(7, payload(*events)))


def plain(batch: EventBatch) -> tuple[KvEvent, ...]:
    """The events with tuples in place of arrays."""
    events: list[KvEvent] = []
    for event in batch.events:
        if isinstance(event, BlocksStored):
            event = replace(event, token_ids=tuple(event.token_ids))
        events.append(event if isinstance(event, TierCleared) else replace(event, hashes=tuple(event.hashes)))
    return tuple(events)


# --- recorded frames ---


@pytest.mark.parametrize("name", SGLANG)
def test_every_sglang_hash_is_recomputed_from_the_decoded_tokens(name: str) -> None:
    full: dict[int, bytes] = {}  # event hash → whole digest, to continue chains from
    blocks = 0
    for sequence, raw in captured_frames(name):
        for event in decode_batch(sequence, raw).events:
            if isinstance(event, BlocksStored):
                parent = None if event.parent is None else full[event.parent]
                digests = content_hashes(event.token_ids, event.block_size, salt=event.salt, parent=parent)
                assert [event_hash(digest) & U64 for digest in digests] == list(event.hashes)
                full.update(zip(event.hashes, digests, strict=True))
                blocks += len(digests)
    assert blocks > 10


@pytest.mark.parametrize("name", VLLM)
def test_every_vllm_hash_is_recomputed_from_the_decoded_tokens(name: str) -> None:
    full: dict[int | None, bytes] = {None: vllm_hash("0")}
    blocks = 0
    for sequence, raw in captured_frames(name):
        for event in decode_batch(sequence, raw).events:
            if isinstance(event, BlocksStored):
                parent = full[event.parent]
                for i, name_of_block in enumerate(event.hashes):
                    tokens = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
                    extra = (("cache_salt", event.salt),) if event.salt and i == 0 else None
                    parent = vllm_hash((parent, tokens, extra))
                    assert int.from_bytes(parent, "big") & U64 == name_of_block
                    full[name_of_block] = parent
                    blocks += 1
    assert blocks > 10


def vllm_hash(value: object) -> bytes:
    return hashlib.sha256(canonical_cbor(value)).digest()


def canonical_cbor(value: object) -> bytes:
    """As much of RFC 8949's deterministic encoding as vLLM's block hashes need."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return cbor_head(0, value)
    if isinstance(value, bytes):
        return cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return cbor_head(3, len(value.encode())) + value.encode()
    assert isinstance(value, tuple)
    return cbor_head(4, len(value)) + b"".join(map(canonical_cbor, value))


def cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    width = next(w for w in (1, 2, 4, 8) if value < 256**w)
    return bytes([major << 5 | 24 + (1, 2, 4, 8).index(width)]) + value.to_bytes(width, "big")


@pytest.mark.parametrize("name", SGLANG + VLLM)
def test_nothing_of_a_recorded_frame_is_lost_or_invented(name: str) -> None:
    for sequence, raw in captured_frames(name):
        batch = decode_batch(sequence, raw)
        wire = wire_events(raw)
        assert (batch.sequence, batch.rank, batch.ignored) == (sequence, 0, ())
        assert [type(event).__name__ for event in batch.events] == [
            {"BlockStored": "BlocksStored", "BlockRemoved": "BlocksRemoved", "AllBlocksCleared": "TierCleared"}[
                event["type"]
            ]
            for event in wire
        ]
        for event, fields in zip(batch.events, wire, strict=True):
            if isinstance(event, BlocksStored):
                assert list(event.token_ids) == fields["token_ids"]
            if not isinstance(event, TierCleared):
                assert [h & U64 for h in fields["block_hashes"]] == list(event.hashes)


def test_recorded_salts_and_media_come_through() -> None:
    events = [e for name in SGLANG + VLLM for s, raw in captured_frames(name) for e in decode_batch(s, raw).events]
    stored = [event for event in events if isinstance(event, BlocksStored)]
    assert {event.tier for event in stored} == {Tier.DEVICE, Tier.HOST}
    assert {event.salt for event in stored if event.salt} != set()
    assert any(isinstance(event, TierCleared) and event.tiers == (Tier.DEVICE, Tier.HOST) for event in events)


# --- shapes by version ---

TOKENS = list(range(100, 108))
PLAIN = BlocksStored((1, 2), None, tuple(TOKENS), 4, Tier.DEVICE)
MAP: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": TOKENS,
    "block_size": 4,
    "lora_id": None,
}


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (["BlockStored", [1, 2], None, TOKENS, 4, None], {}),
        (["BlockStored", [1, 2], 9, TOKENS, 4, None, "CPU_PINNED"], {"parent": 9, "tier": Tier.HOST}),
        (["BlockStored", [1, 2], None, TOKENS, 4, None, "GPU", {"cache_salt": "s"}], {"salt": "s"}),
        (["BlockStored", [1, 2], None, TOKENS, 4, None, None, {"cache_salt": "s"}], {"salt": "s"}),
        (["BlockStored", [1, 2], None, TOKENS, 4, 3, "GPU", "x"], {"adapter": "x"}),
        (["BlockStored", [1, 2], None, TOKENS, 4, None, "GPU", None, [["t"], None]], {"salt": "t"}),
        (MAP, {}),
        (MAP | {"medium": "DISK"}, {"tier": Tier.DISK}),
        (MAP | {"medium": "EXTERNAL"}, {"tier": Tier.POOL}),
        (MAP | {"medium": "CPU"}, {"tier": Tier.HOST}),
        (MAP | {"cache_salt": "s", "session_id": "y", "novel": [1, {"a": 2}]}, {"salt": "s"}),
        (MAP | {"lora_name": "x", "lora_id": 3}, {"adapter": "x"}),
        (MAP | {"lora_id": 3}, {"adapter": "3"}),
        (MAP | {"lora_name": "x", "extra_keys": [["x", "t"], ["x"]]}, {"adapter": "x", "salt": "t"}),
        (MAP | {"lora_name": "x", "extra_keys": [["x", "x"], ["x"]]}, {"adapter": "x", "salt": "x"}),
        (MAP | {"extra_keys": [None, None], "group_idx": 0, "kv_cache_spec_kind": "full_attention"}, {}),
        (MAP | {"group_idx": 2, "kv_cache_spec_kind": "mla_attention"}, {}),
        (MAP | {"block_hashes": [-1, 2**64 - 2]}, {"hashes": (2**64 - 1, 2**64 - 2)}),
        (MAP | {"block_hashes": [b"\xaa" * 24 + (5).to_bytes(8, "big"), b"\x06"]}, {"hashes": (5, 6)}),
        (MAP | {"parent_block_hash": -2}, {"parent": 2**64 - 2}),
    ],
)  # fmt: skip
def test_every_shape_of_a_stored_chain(wire: object, expected: dict[str, Any]) -> None:
    assert decoded(wire) == (replace(PLAIN, **expected),)


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (["BlockRemoved", [-1]], BlocksRemoved((2**64 - 1,), Tier.DEVICE)),
        (["BlockRemoved", [1], "CPU_PINNED"], BlocksRemoved((1,), Tier.HOST)),
        ({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 3}, BlocksRemoved((1,), Tier.DEVICE)),
        (["AllBlocksCleared"], TierCleared((Tier.DEVICE, Tier.HOST))),
        ({"type": "AllBlocksCleared"}, TierCleared((Tier.DEVICE, Tier.HOST))),
        ({"type": "AllBlocksCleared", "medium": "DISK"}, TierCleared((Tier.DISK,))),
    ],
)  # fmt: skip
def test_every_shape_of_a_removal(wire: object, expected: KvEvent) -> None:
    assert decoded(wire) == (expected,)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        ({"type": "BlockMoved", "block_hashes": [1]}, "unknown type"),
        (["Heartbeat", 3], "unknown type"),
        (MAP | {"medium": "TAPE"}, "unknown medium"),
        (MAP | {"kv_cache_spec_kind": "sliding_window"}, "sparse group"),
        (MAP | {"group_idx": 1}, "sparse group"),
        (MAP | {"token_ids": TOKENS * 2}, "sparse blocks"),
        (MAP | {"token_ids": [[t, t + 1] for t in TOKENS]}, "token pairs"),
        (MAP | {"extra_keys": [["salt", "image"], None]}, "image or other non-text key"),
    ],
)
def test_what_a_token_chain_cannot_name_is_left_out_and_says_why(wire: object, reason: str) -> None:
    batch = decode_batch(0, payload(wire, ["BlockRemoved", [4]]))
    assert plain(batch) == (BlocksRemoved((4,), Tier.DEVICE),)
    assert batch.ignored == (reason,)


def test_blocks_before_the_first_image_are_kept() -> None:
    batch = decode_batch(0, payload(MAP | {"extra_keys": [["salt"], [["image", 3]]]}))
    assert plain(batch) == (BlocksStored((1,), None, tuple(TOKENS[:4]), 4, Tier.DEVICE, salt="salt"),)
    assert batch.ignored == ("image or other non-text key",)


@pytest.mark.parametrize(("rank", "expected"), [(3, 3), (None, 0)])
def test_the_rank_is_the_message_s(rank: int | None, expected: int) -> None:
    assert decode_batch(0, payload(rank=rank)).rank == expected
    assert decode_batch(0, msgspec.msgpack.encode([1.0, []])).rank == 0


# --- nonsense ---


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.0, 5]),
        payload(5),
        payload([]),
        payload({"block_hashes": [1]}),
        payload(["BlockStored"]),
        payload(["BlockRemoved"]),
        payload(["BlockRemoved", 5]),
        payload(["BlockRemoved", ["x"]]),
        payload(MAP | {"block_size": 0}),
        payload(MAP | {"block_size": None}),
        payload(MAP | {"token_ids": None}),
        payload(MAP | {"token_ids": [-1] * 8}),
        payload(MAP | {"token_ids": [2**32] * 8}),
        payload(MAP | {"token_ids": [1, "a"] * 4}),
        payload(MAP | {"token_ids": [1, 2.0] * 4}),
        payload(MAP | {"block_size": 1, "token_ids": [-1, 2]}),
        payload(MAP | {"medium": ["GPU"]}),
        msgspec.msgpack.encode([1.0, {"type": "BlockStored"}, 0]),
        payload(MAP | {"extra_keys": [5, 6]}),
        payload(MAP)[:-5],
    ],
)
def test_nonsense_is_a_wire_error(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(0, raw)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_bytes_decode_or_raise_a_wire_error(raw: bytes) -> None:
    try:
        decode_batch(0, raw)
    except WireError:
        pass


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_frames_decode_or_raise_a_wire_error(data: st.DataObject) -> None:
    raw = bytearray(captured_frames(SGLANG[1])[0][1])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(0, bytes(raw))
    except WireError:
        pass


# --- our own publisher ---

names = st.lists(st.integers(0, U64), min_size=1, max_size=4).map(tuple)
tiers = st.sampled_from(Tier)


@st.composite
def stored_events(draw: st.DrawFn) -> BlocksStored:
    hashes, block_size = draw(names), draw(st.integers(1, 4))
    size = len(hashes) * block_size
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size))
    text = st.none() | st.text(min_size=1, max_size=5)
    parent = draw(st.none() | st.integers(0, U64))
    return BlocksStored(hashes, parent, tuple(tokens), block_size, draw(tiers), draw(text), draw(text))


events = st.one_of(
    stored_events(),
    st.builds(BlocksRemoved, names, tiers),
    st.sampled_from([TierCleared((Tier.DEVICE, Tier.HOST)), TierCleared((Tier.DISK,)), TierCleared((Tier.POOL,))]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(events, max_size=4).map(tuple), st.integers(0, 7))
def test_what_our_publisher_encodes_is_decoded_unchanged(batch: tuple[KvEvent, ...], rank: int) -> None:
    sent = EventBatch(5, 1.5, batch, rank)
    got = decode_batch(5, encode_sglang(sent))
    assert plain(got) == sent.events
    assert (got.sequence, got.published_at_s, got.rank, got.ignored) == (5, 1.5, rank, ())


def test_a_clearing_of_everything_is_a_flush_and_the_other_tiers() -> None:
    got = decode_batch(0, encode_sglang(EventBatch(0, 0.0, (TierCleared(tuple(Tier)),)))).events
    assert [event.tiers for event in got if isinstance(event, TierCleared)] == [
        (Tier.DEVICE, Tier.HOST),
        (Tier.DISK,),
        (Tier.POOL,),
    ]


def test_a_source_says_what_its_clearing_covers() -> None:
    wire = payload(["AllBlocksCleared"], {"type": "AllBlocksCleared", "medium": "CPU_PINNED"})
    assert decode_batch(0, wire, (Tier.DEVICE,)).events == (TierCleared((Tier.DEVICE,)), TierCleared((Tier.HOST,)))
