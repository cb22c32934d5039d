"""The pure parts of the vLLM connector: options, identity, events, and the engine's cache as pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine_adapter.wire_events import decode_batch
from kvstore.block import token_bytes
from kvstore.events import BlocksRemoved, BlocksStored
from kvstore.page import PageMeta, Tier
from kvstore.plugins.vllm.events import EventKinds, engine_events
from kvstore.plugins.vllm.holdings import Holdings
from kvstore.plugins.vllm.identity import page_layout
from kvstore.plugins.vllm.messages import Removed, Stored
from kvstore.plugins.vllm.options import read_options
from kvstore.plugins.vllm.paged_cache import PagedCache, UnsupportedCache


class _Stored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """As vLLM 0.32 writes it (``distributed/kv_events.py``): vLLM itself is not here."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class _Removed(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


_KINDS = EventKinds(_Stored, _Removed, lambda name: int.from_bytes(name[-8:], "big"))


def _name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _chain(first: int, count: int, salt: str | None = None) -> tuple[tuple[bytes, PageMeta], ...]:
    return tuple(
        (
            _name(first + n),
            PageMeta(_name(first + n - 1) if n else None, token_bytes([10 * n, 10 * n + 1]), salt),
        )
        for n in range(count)
    )


def _told(*changes: Stored | Removed) -> tuple[Any, ...]:
    """Go the whole way: changes, vLLM's events, its wire, our reader."""
    events = list(engine_events(changes, 2, _KINDS))
    batch = decode_batch(0, msgspec.msgpack.encode([1.0, events, 0]))
    assert batch.ignored == ()
    return batch.events


def test_changes_reach_the_index_as_vllms_own_events() -> None:
    stored, removed = _told(Stored(Tier.DISK, _chain(100, 3)), Removed(Tier.HOST, (_name(100),)))
    assert isinstance(stored, BlocksStored)
    assert (list(stored.hashes), stored.parent, stored.tier) == ([100, 101, 102], None, Tier.DISK)
    assert (list(stored.token_ids), stored.block_size, stored.salt) == ([0, 1, 10, 11, 20, 21], 2, None)
    assert isinstance(removed, BlocksRemoved)
    assert (list(removed.hashes), removed.tier) == ([100], Tier.HOST)


def test_chains_are_told_apart_and_salts_are_told() -> None:
    one, two = _chain(100, 2, "red"), _chain(200, 2)
    red, tail, plain = _told(Stored(Tier.POOL, (*one[:1], *two[1:], *two[:1])))
    assert (red.salt, list(red.hashes), red.tier) == ("red", [100], Tier.POOL)
    assert (tail.parent, list(tail.hashes), tail.salt) == (200, [201], None)
    assert (plain.parent, list(plain.hashes)) == (None, [200])
    (whole,) = _told(Stored(Tier.POOL, one))
    assert (whole.salt, list(whole.hashes)) == ("red", [100, 101])


def test_a_block_is_held_when_all_ranks_have_it() -> None:
    holdings, pages = Holdings(2), _chain(1, 2)
    assert holdings.apply(0, [Stored(Tier.HOST, pages)]) == []
    assert holdings.tier_of(_name(1)) is None
    assert holdings.apply(1, [Stored(Tier.DISK, pages[:1])]) == []
    assert holdings.tier_of(_name(1)) is Tier.DISK  # the slower of the two
    assert holdings.apply(1, [Stored(Tier.HOST, pages)]) == [Stored(Tier.HOST, pages)]
    assert holdings.apply(1, [Stored(Tier.HOST, pages)]) == []
    assert holdings.tier_of(_name(2)) is Tier.HOST
    assert holdings.apply(0, [Removed(Tier.HOST, (_name(2), _name(7)))]) == [Removed(Tier.HOST, (_name(2),))]
    assert holdings.tier_of(_name(2)) is None
    assert not holdings.has(_name(2))


def _server(**more: object) -> Any:
    model = {
        "dtype": torch.float32,
        "quantization": None,
        "served_model_name": "m",
        "hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4, "_name_or_path": "somewhere"}),
    }
    caching = {"block_size": 4, "cache_dtype": "auto"}
    parallel = {"rank": 0, "world_size": 1}
    for part in (model, caching, parallel):
        part.update({name: value for name, value in more.items() if name in part})
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**caching),
        parallel_config=SimpleNamespace(**parallel),
    )


def _cache(dtype: torch.dtype = torch.float32, tokens: int = 4, layers: int = 2) -> PagedCache:
    return PagedCache({f"l{n}": torch.zeros((3, 2, tokens, 8), dtype=dtype) for n in range(layers)}, 3)


def test_whatever_changes_a_byte_changes_the_fingerprint() -> None:
    def layout(cache: PagedCache | None = None, **more: Any) -> bytes:
        own = {name: more.pop(name) for name in ("weights_id", "namespace", "version") if name in more}
        known = {"weights_id": "w", "namespace": "", "version": "0.32.0", **own}
        return page_layout(cache or _cache(), _server(**more), **known).fingerprint

    same = layout()
    assert layout(version="0.32.1") == same
    others = [
        layout(weights_id="other"),
        layout(namespace="n"),
        layout(version="0.33.0"),
        layout(dtype=torch.bfloat16),
        layout(block_size=8),
        layout(cache_dtype="fp8"),
        layout(quantization="awq"),
        layout(served_model_name="other"),
        layout(hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e6})),
        layout(rank=1, world_size=2),
        layout(_cache(torch.float16)),
        layout(_cache(tokens=8)),
        layout(_cache(layers=3)),
    ]
    assert len({same, *others}) == 1 + len(others)
    moved = SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4, "_name_or_path": "elsewhere"})
    assert layout(hf_config=moved) == same


def test_pages_go_out_and_come_in_whatever_the_order_in_memory() -> None:
    plain = torch.arange(3 * 2 * 4 * 8, dtype=torch.float32).reshape(3, 2, 4, 8)
    by_token = plain.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)  # [block, token, head, content] in memory
    halves = plain.reshape(6, 2, 2, 8).clone()  # attention cuts each block in two
    rows = {}
    for name, tensor in (("plain", plain), ("by token", by_token)):
        cache = PagedCache({"a": tensor.clone() if name == "plain" else tensor, "b": -plain}, 3)
        rows[name] = np.zeros((2, cache.page_bytes), np.uint8)
        cache.copy_out([2, 0], rows[name])
    assert np.array_equal(rows["plain"], rows["by token"])
    target = {"a": torch.zeros_like(plain), "b": torch.zeros_like(plain)}
    into = PagedCache(target, 3)
    into.copy_in(1, memoryview(rows["plain"][0]))
    assert torch.equal(target["a"][1], plain[2])
    assert torch.equal(target["b"][1], -plain[2])
    assert not target["a"][0].any()
    assert PagedCache({"a": halves}, 3).page_bytes == 2 * 4 * 8 * 4


def test_the_way_through_a_device_moves_the_same_bytes() -> None:
    """On CPU tensors: there is no GPU here."""
    layers = {"a": torch.rand((3, 2, 4, 8)), "b": torch.rand((3, 4, 2, 8)).permute(0, 2, 1, 3)}
    plain, device = PagedCache(layers, 3), PagedCache(layers, 3)
    device._arrays = None
    rows = [np.zeros((2, plain.page_bytes), np.uint8) for _ in range(2)]
    plain.copy_out([2, 0], rows[0])
    device.copy_out([2, 0], rows[1])
    assert np.array_equal(*rows)
    device.copy_in(1, memoryview(rows[0][0]))
    assert torch.equal(layers["a"][1], layers["a"][2])
    assert torch.equal(layers["b"][1], layers["b"][2])


def test_layers_that_share_a_tensor_are_one() -> None:
    tensor = torch.zeros((3, 2, 4, 8))
    assert PagedCache({"a": tensor, "b": tensor}, 3).page_bytes == 2 * 4 * 8 * 4


@pytest.mark.parametrize("layers", [{}, {"a": torch.zeros((4, 2))}, {"a": torch.zeros((3, 2, 8)).transpose(1, 2)}])
def test_caches_of_other_shapes_are_refused(layers: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedCache):
        PagedCache(layers, 3)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"dsik": "/pages"}, "dsik"),
        ({"disk": "/pages"}, "disk_gb"),
        ({"disk": 3, "disk_gb": 1}, "disk"),
        ({"host_gb": 0}, "host_gb"),
        ({"claim_margin": 0}, "claim_margin"),
        ({"pool": "redis://h", "pool_gb": -1}, "negative"),
    ],
)
def test_wrong_options_are_named(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_options(extra)


def test_right_options_are_read() -> None:
    options = read_options({"disk": "~/pages", "disk_gb": 2, "pool": "redis://h:6379"})
    assert (options.disk_bytes, options.host_bytes) == (2_000_000_000, 1_000_000_000)
    assert options.disk_path is not None
    assert "~" not in str(options.disk_path)
    assert read_options({}).disk_bytes == 0
