"""SGLang's storage interface, kept by the plug-in: calls as the real engine made them, a real disk, a real pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.page import Tier
from kvstore.tiers.pool_server import PoolServer
from tests.samples.sglang_host import FACTS, Engine, FakeHostPool, FakeTensor, key_chain, page_content, recorded_calls

ALWAYS_WORTH = {"prefill_tokens_per_s": 0.001}


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=64 << 20) as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"disk": str(folder), "disk_gb": 0.01, **ALWAYS_WORTH, **more}


def in_pool(server: PoolServer, **more: Any) -> dict[str, Any]:
    return {"pool": server.url, "pool_gb": 0.01, **ALWAYS_WORTH, **more}


def whole_chain(call: dict[str, Any]) -> list[str]:
    """Recordings keep a call's first two keys: the others follow from the last one of them."""
    first: list[str] = call.get("keys", [])
    return [*first, *key_chain(call["n"] - len(first), seed=first[-1])] if call["n"] > len(first) else first


@pytest.mark.parametrize("medium", ["disk", "pool"])
def test_recorded_calls_of_the_zero_copy_interface_get_the_recorded_answers(
    medium: str, folder: Path, server: PoolServer
) -> None:
    options = on_disk(folder) if medium == "disk" else in_pool(server, namespace="recorded v1")
    engine = Engine(options)
    answered = 0
    for call in recorded_calls("v1"):
        if call["fn"] == "batch_exists":
            assert engine.backend.batch_exists(whole_chain(call)) == call["hit"]
            answered += 1
        elif call["fn"] == "batch_set_v1":
            assert engine.store(whole_chain(call)) == [True] * call["n"]
            answered += 1
        elif call["fn"] == "batch_get_v1":
            found = engine.load(whole_chain(call))
            assert sum(found) == call["hits"] == call["n"]
            answered += 1
        elif call["fn"] == "clear":
            engine.backend.clear()
            assert not engine.backend.exists(recorded_calls("v1")[5]["keys"][0])
    engine.backend.close()
    assert answered == 21


def test_recorded_calls_of_the_generic_interface_get_the_recorded_answers(folder: Path) -> None:
    engine = Engine(on_disk(folder), zero_copy=False)
    backend, pending, answered = engine.backend, [], 0
    for call in recorded_calls("generic"):
        if call["fn"] == "batch_exists":
            keys = whole_chain(call)
            assert backend.batch_exists(keys) == call["hit"]
            pending = [keys, *pending]
            answered += 1
        elif call["fn"] == "batch_set":  # its keys were not recorded: those that were asked for with as many pages
            keys = next((keys for keys in pending if len(keys) == call["n"]), key_chain(call["n"], str(call["t"])))
            values = [FakeTensor(page_content(key, engine.pool.page_bytes).copy()) for key in keys]
            assert backend.batch_set(keys, values)
            engine.flush()
            answered += 1
        elif call["fn"] == "batch_get":
            keys = pending[0]
            targets = [FakeTensor(np.zeros(engine.pool.page_bytes, np.uint8)) for _ in keys]
            assert backend.batch_get(keys, targets) == targets
            assert all((t.array == page_content(k, t.array.size)).all() for t, k in zip(targets, keys, strict=True))
            answered += 1
    backend.close()
    assert answered == 56


def test_single_pages_of_the_generic_interface(folder: Path) -> None:
    engine = Engine(on_disk(folder), zero_copy=False)
    key, absent = key_chain(2)
    assert engine.backend.set(key, FakeTensor(page_content(key, engine.pool.page_bytes).copy()))
    engine.flush()
    assert engine.backend.exists(key)
    assert not engine.backend.exists(absent)
    target = FakeTensor(np.zeros(engine.pool.page_bytes, np.uint8))
    assert engine.backend.get(key, target) is target
    assert engine.backend.get(absent, target) is None
    engine.backend.close()


def test_a_run_ends_at_the_first_page_that_is_missing(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    keys = key_chain(8)
    engine.store(keys[:3])
    engine.store(keys[4:], first_page=8)
    assert engine.backend.batch_exists(keys) == 3
    assert engine.load(keys)[:4] == [True, True, True, False]
    engine.backend.close()


def test_pages_are_stored_once(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    keys = key_chain(4)
    for _ in range(3):
        assert engine.store(keys) == [True] * 4
    assert engine.backend.shelves["kv"].stats()[Tier.DISK].puts == 4
    engine.backend.close()


def test_a_page_is_there_from_the_moment_that_it_was_handed_over(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    keys = key_chain(4)
    engine.pool.fill(range(4), keys)
    engine.backend.batch_set_v1(keys, engine.pool.slots(range(4)))
    engine.pool.memory[:, :4] = 7  # the engine's memory is its own again
    assert engine.backend.batch_exists(keys) == 4
    assert engine.load(keys) == [True] * 4
    engine.backend.close()


def test_more_than_the_buffer_holds_goes_through_it(folder: Path) -> None:
    engine = Engine(on_disk(folder, buffer_gb=6 * 4096 / 1e9), pool=FakeHostPool(pages=128))
    keys = key_chain(64)
    assert engine.store(keys) == [True] * 64
    assert engine.backend.shelves["kv"].stats()[Tier.DISK].puts == 64
    assert engine.load(keys, first_page=64) == [True] * 64
    engine.backend.close()


def test_a_restarted_engine_finds_its_pages_on_disk(folder: Path) -> None:
    keys = key_chain(6)
    first = Engine(on_disk(folder))
    first.store(keys)
    first.backend.close()
    second = Engine(on_disk(folder))
    assert second.backend.batch_exists(keys) == 6
    assert second.load(keys) == [True] * 6
    second.backend.close()


def test_two_engines_share_through_the_pool(server: PoolServer) -> None:
    keys = key_chain(6, "shared")
    one, other = Engine(in_pool(server)), Engine(in_pool(server))
    one.store(keys)
    assert other.backend.batch_exists(keys) == 6
    assert other.load(keys) == [True] * 6
    one.backend.close()
    other.backend.close()


DIFFERENT = {
    "weights": {"options": {"weights_id": "others"}},
    "namespace": {"options": {"namespace": "blue"}},
    "model name": {"config": {"model_name": "other"}},
    "tensor-parallel rank": {"config": {"tp_rank": 1, "tp_size": 2}},
    "tensor-parallel size": {"config": {"tp_size": 2}},
    "pipeline stage": {"config": {"pp_rank": 1, "pp_size": 2}},
    "context-parallel rank": {"config": {"attn_cp_rank": 1, "attn_cp_size": 2}},
    "dtype": {"pool": {"dtype": "torch.float16"}},
    "page size": {"pool": {"page_size": 32}},
    "layout": {"pool": {"layout": "page_first"}},
    "layers": {"pool": {"layers": 4, "heads": 1}},
    "KV dtype": {"facts": {"kv_cache_dtype": "fp8_e5m2"}},
    "engine version": {"version": "0.5.24"},
    "interface": {"zero_copy": False},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_an_engine_that_differs_never_gets_a_page(what: str, server: PoolServer) -> None:
    different: dict[str, Any] = DIFFERENT[what]
    keys = key_chain(4, "isolated")
    first = Engine(in_pool(server))
    first.store(keys)
    facts = replace(
        FACTS, version=different.get("version", FACTS.version), settings=different.get("facts", FACTS.settings)
    )
    second = Engine(
        in_pool(server, **different.get("options", {})),
        pool=FakeHostPool(**different.get("pool", {})),
        facts=facts,
        config=different.get("config", {}),
        zero_copy=different.get("zero_copy", True),
    )
    assert first.backend.batch_exists(keys) == 4
    assert second.backend.batch_exists(keys) == 0
    first.backend.close()
    second.backend.close()


def mla(server: PoolServer, rank: int, **more: Any) -> Engine:
    config = {"is_mla_model": True, "tp_rank": rank, "tp_size": 2}
    return Engine(in_pool(server, namespace="mla"), pool=FakeHostPool(pieces=1), config=config, **more)


def test_under_mla_one_rank_writes_what_all_read(server: PoolServer) -> None:
    keys = key_chain(4, "mla")
    writer, reader = mla(server, 0), mla(server, 1)
    assert reader.store(keys) == [False] * 4
    assert (reader.backend.batch_exists(keys), writer.backend.batch_exists(keys)) == (0, 0)
    writer.store(keys)
    assert [engine.backend.batch_exists(keys) for engine in (writer, reader)] == [4, 4]
    assert reader.load(keys) == [True] * 4
    reader.backend.clear()
    assert writer.backend.batch_exists(keys) == 4, "what is not a rank's to write is not its to clear"
    writer.backend.close()
    reader.backend.close()


def test_ranks_that_each_hold_a_part_answer_alike(server: PoolServer) -> None:
    keys = key_chain(5, "ranks")
    ranks = [Engine(in_pool(server, namespace="tp"), config={"tp_rank": rank, "tp_size": 2}) for rank in range(2)]
    for engine in ranks:
        engine.store(keys[:4])
    assert [engine.backend.batch_exists(keys) for engine in ranks] == [4, 4]
    for engine in ranks:
        engine.backend.close()


def transfer(name: str, keys: list[str], slots: Any = None, policy: str = "all_pages") -> SimpleNamespace:
    return SimpleNamespace(name=name, keys=keys, host_indices=slots, hit_policy=policy)


def test_pools_beside_the_kv_are_kept_and_restored_with_it(folder: Path) -> None:
    side = FakeHostPool(page_size=1, layers=1, heads=1, dim=8, pieces=1)
    engine = Engine(on_disk(folder), side_pools={"indexer": side})
    backend, keys = engine.backend, key_chain(4)
    engine.store(keys)
    assert backend.batch_exists_v2(keys, [transfer("indexer", keys)]).kv_hit_pages == 0
    side.fill(range(3), keys[:3])
    kv, more = transfer("kv", keys, engine.pool.slots(range(4))), transfer("indexer", keys[:3], side.slots(range(3)))
    engine.pool.fill(range(4), keys)
    assert backend.batch_set_v2([kv, more]) == {"kv": [True] * 4, "indexer": [True] * 3}
    engine.flush()
    hits = backend.batch_exists_v2(keys, [transfer("indexer", keys)])
    assert (hits.kv_hit_pages, hits.extra_pool_hit_pages) == (3, {"kv": 4, "indexer": 3})
    side.memory[:] = 0
    assert backend.batch_get_v2([transfer("indexer", keys[:3], side.slots([5, 6, 7]))]) == {"indexer": [True] * 3}
    assert all(side.holds(page, key) for page, key in zip((5, 6, 7), keys, strict=False))
    backend.close()


def test_a_pool_of_which_the_end_is_needed_restores_where_it_is(folder: Path) -> None:
    side = FakeHostPool(page_size=1, layers=1, heads=1, dim=8, pieces=1)
    engine = Engine(on_disk(folder), side_pools={"mamba": side})
    backend, keys = engine.backend, key_chain(6)
    engine.store(keys)
    side.fill([0, 1], [keys[1], keys[3]])
    backend.batch_set_v2([transfer("mamba", [keys[1], keys[3]], side.slots([0, 1]))])
    engine.flush()
    hits = backend.batch_exists_v2(keys, [transfer("mamba", keys[-1:], policy="trailing_pages")])
    assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (4, [2, 4])
    other = backend.batch_exists_v2(keys, [transfer("mamba", keys, policy="block_groups")])
    assert other.kv_hit_pages == 6
    backend.close()


def test_detached_and_attached_again(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    keys = key_chain(4)
    engine.store(keys)
    engine.backend.close()
    engine.backend.close()
    assert engine.backend.batch_exists(keys) == 0
    assert engine.backend.batch_get_v1(keys, engine.pool.slots(range(4))) == [False] * 4
    assert engine.backend.batch_set_v1(keys, engine.pool.slots(range(4))) == [False] * 4
    engine.backend.clear()
    engine.backend.register_mem_pool_host(engine.pool)
    engine.backend.on_host_pools_registered()
    assert engine.backend.batch_exists(keys) == 4
    engine.backend.close()


def test_pages_of_weights_that_were_changed_in_place_are_out_of_reach_at_once(folder: Path, server: PoolServer) -> None:
    options = {**on_disk(folder), **in_pool(server, namespace="changed in place")}
    engine, other = Engine(options), Engine(in_pool(server, namespace="changed in place"))
    keys = key_chain(4)
    engine.store(keys)
    engine.weights_version = "step 2"
    assert engine.backend.batch_exists(keys) == 0
    assert engine.load(keys) == [False] * 4
    assert engine.backend.batch_set_v1(keys, engine.pool.slots(range(4))) == [False] * 4  # of which weights?
    assert other.load(keys) == [True] * 4
    engine.backend.close()
    attached = Engine(options, weights_version="step 2")
    assert attached.backend.batch_exists(keys) == 0
    attached.store(keys)
    assert attached.load(keys) == [True] * 4
    attached.weights_version = "step 3"
    attached.backend.clear()
    assert attached.backend.batch_exists(keys) == 0
    attached.store(keys)
    assert attached.load(keys) == [True] * 4
    assert other.load(keys) == [True] * 4
    for each in (attached, other):
        each.backend.close()


def test_clear_leaves_nothing(folder: Path, server: PoolServer) -> None:
    engine = Engine({**on_disk(folder), **in_pool(server, namespace="cleared")})
    keys = key_chain(4)
    engine.store(keys)
    engine.backend.clear()
    assert engine.backend.batch_exists(keys) == 0
    assert engine.load(keys) == [False] * 4
    engine.backend.close()


def test_keys_of_another_kind_are_keys_too(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    keys = ["ukv1-abc_L0-4", "f" * 63 + "g", "ä", ""]
    assert engine.store(keys) == [True] * 4
    assert engine.backend.batch_exists(keys) == 4
    assert engine.load(keys) == [True] * 4
    engine.backend.close()


def test_what_was_moved_is_told_once(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    keys = key_chain(4)
    engine.store(keys)
    engine.load(keys)
    told = engine.backend.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([4], [4])
    assert told.backup_bandwidth[0] > 0
    assert told.prefetch_bandwidth[0] > 0
    assert engine.backend.get_stats().backup_pgs == []
    engine.backend.close()


def test_slots_that_do_not_fit_the_keys_move_nothing(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    keys = key_chain(3)
    short = engine.pool.slots(range(2))
    assert engine.backend.batch_set_v1(keys, short) == [False] * 3
    assert engine.backend.batch_get_v1(keys, None) == [False] * 3
    assert engine.backend.batch_get_v2([transfer("nobody's", keys, short)]) == {"nobody's": [False] * 3}
    engine.backend.close()
