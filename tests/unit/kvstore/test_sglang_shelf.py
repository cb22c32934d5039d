"""What a shelf claims: pages that are there, and of those the ones that are worth waiting for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.page import Tier
from kvstore.plugins.sglang.backend import Backend
from kvstore.plugins.sglang.shelf import Shelf
from kvstore.tiers.pool_server import PoolServer
from tests.samples.sglang_host import Engine, key_chain

PATIENCE_S = 30.0
KEYS = key_chain(8)


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=32 << 20) as started:
        yield started


def engine_with(server: PoolServer, folder: Path, **more: Any) -> Engine:
    options = {"pool": server.url, "pool_gb": 0.01, "disk": str(folder), "disk_gb": 0.01, "buffer_gb": 0.0}
    return Engine({**options, "namespace": str(folder), "prefill_tokens_per_s": 1000.0, **more})


def the_shelf(backend: Backend) -> Shelf:
    return backend.shelves["kv"]


def only_in_pool(engine: Engine, keys: list[str]) -> None:
    """Store pages, and lose them from the disk."""
    engine.store(keys)
    shelf = the_shelf(engine.backend)
    disk = next(tier for tier in shelf.store.tiers if tier.tier is Tier.DISK)
    disk.clear()


def make_slow(shelf: Shelf) -> None:
    """Have it learn that the pool takes longer than computing."""
    for _ in range(10):
        shelf._observe_read(Tier.POOL, 8 * shelf.page_bytes, 5.0)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_slow_pool_is_not_claimed_and_not_even_asked(tmp_path: Path, server: PoolServer) -> None:
    engine = engine_with(server, tmp_path)
    only_in_pool(engine, KEYS)
    assert engine.backend.batch_exists(KEYS) == 8
    shelf = the_shelf(engine.backend)
    make_slow(shelf)
    asked: list[Tier] = []
    pool = shelf.store.tiers[1]
    exists = pool.exists
    pool.exists = lambda keys: (asked.append(Tier.POOL), exists(keys))[1]  # type: ignore[method-assign]
    assert engine.backend.batch_exists(KEYS) == 0
    assert asked == []
    engine.backend.close()


def test_what_the_disk_has_is_claimed_beside_a_slow_pool(tmp_path: Path, server: PoolServer) -> None:
    engine = engine_with(server, tmp_path)
    only_in_pool(engine, KEYS)
    engine.store(KEYS[:5])
    make_slow(the_shelf(engine.backend))
    assert engine.backend.batch_exists(KEYS) == 5
    engine.backend.close()


def test_a_pool_that_is_fast_again_is_found_out_with_no_request_waiting(tmp_path: Path, server: PoolServer) -> None:
    engine = engine_with(server, tmp_path)
    only_in_pool(engine, KEYS)
    shelf = the_shelf(engine.backend)
    now_s = [1000.0]
    shelf._clock = lambda: now_s[0]
    make_slow(shelf)
    assert engine.backend.batch_exists(KEYS) == 0

    def claimed() -> bool:
        now_s[0] += 10.0  # longer than a refusal stands without a new reading
        return engine.backend.batch_exists(KEYS) == 8

    until(claimed)
    assert engine.load(KEYS) == [True] * 8
    engine.backend.close()


def test_a_pool_that_turned_slow_is_waited_for_as_long_as_computing_takes(tmp_path: Path, server: PoolServer) -> None:
    engine = engine_with(server, tmp_path, deadline_ms=60_000.0)
    only_in_pool(engine, KEYS)
    shelf = the_shelf(engine.backend)
    gate, read = threading.Event(), shelf.store.tiers[1].get
    shelf.store.tiers[1].get = lambda keys, out: (gate.wait(60), read(keys, out))[1]  # type: ignore[method-assign]
    assert engine.backend.batch_exists(KEYS) == 8
    began_s = time.monotonic()
    assert engine.load(KEYS) == [False] * 8
    assert time.monotonic() - began_s < 30.0  # of the 60 that its deadline would have allowed
    gate.set()
    engine.backend.close()


def test_how_fast_the_engine_computes_is_learned_from_what_it_stores(tmp_path: Path, server: PoolServer) -> None:
    engine = engine_with(server, tmp_path, prefill_tokens_per_s=None)
    shelf = the_shelf(engine.backend)
    assert engine.backend.batch_exists(KEYS) == 0
    assert shelf.worth.prefill.tokens_per_s is None
    time_s = time.monotonic()
    engine.store(KEYS)
    assert shelf.worth.prefill.tokens_per_s is not None
    assert shelf.worth.prefill.tokens_per_s >= 128 / (time.monotonic() - time_s + 1.0)
    engine.backend.close()


def test_few_tokens_say_nothing_of_how_fast_it_computes(tmp_path: Path, server: PoolServer) -> None:
    engine = engine_with(server, tmp_path, prefill_tokens_per_s=None)
    engine.backend.batch_exists(KEYS[:3])
    engine.store(KEYS[:3])
    assert the_shelf(engine.backend).worth.prefill.tokens_per_s is None
    engine.backend.close()
