"""What can happen under SGLang's storage: the engine gets a miss in time, and never a wrong byte or an exception."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.page import Tier
from kvstore.tiers.disk import lock_folder
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.slab import HEADER_BYTES, SLAB_NAME
from tests.samples.ports import free_ports
from tests.samples.sglang_host import Engine, key_chain
from tests.samples.slow_way import SlowWay

ALWAYS_WORTH = {"prefill_tokens_per_s": 0.001}
KEYS = key_chain(8)
PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=64 << 20) as started:
        yield started


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    """Return options without a buffer: what is read comes from the disk."""
    return {"disk": str(folder), "disk_gb": 0.01, "buffer_gb": 0.0, **ALWAYS_WORTH, **more}


def in_pool(server: PoolServer, **more: Any) -> dict[str, Any]:
    return {"pool": server.url, "pool_gb": 0.01, "buffer_gb": 0.0, **ALWAYS_WORTH, **more}


def the_slab(folder: Path) -> Path:
    (slab,) = folder.glob(f"*/{SLAB_NAME}")
    return slab


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("byte", [0, 2047, 2048, 4095])
def test_a_flipped_bit_is_a_miss_and_ends_the_run(folder: Path, byte: int) -> None:
    engine = Engine(on_disk(folder))
    engine.store(KEYS)
    engine.backend.close()
    flip(the_slab(folder), HEADER_BYTES + 2 * engine.pool.page_bytes + byte)  # the third page that was stored
    engine = Engine(on_disk(folder))
    assert engine.load(KEYS)[:3] == [True, True, False]
    assert engine.backend.shelves["kv"].stats()[Tier.DISK].alarms == {"checksum": 1}
    assert engine.backend.batch_exists(KEYS) == 2, "what did not verify is forgotten"
    assert engine.store(KEYS) == [True] * 8
    assert engine.load(KEYS) == [True] * 8
    engine.backend.close()


def test_a_bit_that_flips_in_the_pool_is_a_miss(server: PoolServer) -> None:
    engine = Engine(in_pool(server))
    engine.store(KEYS[:1])
    with redis.Redis.from_url(server.url) as client:
        (name,) = client.keys()
        client.setrange(name, client.strlen(name) - 5, b"\0\0")
    assert engine.load(KEYS[:1]) == [False]
    engine.backend.close()


def test_a_cut_slab_loses_what_was_cut_off_and_no_more(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    engine.store(KEYS)
    engine.backend.close()
    os.truncate(the_slab(folder), HEADER_BYTES + 5 * engine.pool.page_bytes)
    engine = Engine(on_disk(folder))
    assert engine.backend.batch_exists(KEYS) == 5
    assert engine.load(KEYS[:5]) == [True] * 5
    engine.backend.close()


def test_a_silent_pool_is_a_miss(server: PoolServer) -> None:
    engine = Engine(in_pool(server, deadline_ms=200.0))
    engine.store(KEYS)
    with redis.Redis.from_url(server.url) as client:
        process = int(client.info("server")["process_id"])
    os.kill(process, signal.SIGSTOP)
    try:
        assert engine.backend.batch_exists(KEYS) == 0
        assert engine.load(KEYS) == [False] * 8
        assert engine.backend.batch_set_v1(KEYS, engine.pool.slots(range(8))) == [False] * 8
    finally:
        os.kill(process, signal.SIGCONT)
    breaker = engine.backend.shelves["kv"].store.tiers[0].breaker  # type: ignore[attr-defined]
    assert breaker.wait_closed(30.0)
    assert engine.load(KEYS) == [True] * 8
    engine.backend.close()


def test_a_silent_pool_does_not_take_the_disk_along(folder: Path, server: PoolServer) -> None:
    engine = Engine({**on_disk(folder), **in_pool(server, deadline_ms=1000.0)})  # of the disk, too
    engine.store(KEYS)
    with redis.Redis.from_url(server.url) as client:
        process = int(client.info("server")["process_id"])
    os.kill(process, signal.SIGSTOP)
    try:
        assert engine.backend.batch_exists(KEYS) == 8
        assert engine.load(KEYS) == [True] * 8
        more = key_chain(2, "meanwhile")
        assert engine.store(more, first_page=16) == [True] * 2
        assert engine.load(more) == [True] * 2
    finally:
        os.kill(process, signal.SIGCONT)
    engine.backend.close()


def test_a_pool_that_was_late_is_asked_for_nothing_until_it_has_been_in_time() -> None:
    (port,) = free_ports(1)
    with PoolServer(max_bytes=32 << 20, port=port) as server:
        way = SlowWay(port)
        slow = {"pool": f"redis://127.0.0.1:{way.port}", "deadline_ms": 1000.0}
        engine = Engine({**in_pool(server), **slow})
        writer = Engine(in_pool(server))
        assert writer.store(KEYS) == [True] * 8
        assert engine.backend.batch_exists(KEYS) == 8
        way.latency_s = 3.0
        assert engine.load(KEYS) == [False] * 8
        way.latency_s = 0.0
        asked: list[int] = []
        pool = engine.backend.shelves["kv"].store.tiers[0]
        exists = pool.exists
        pool.exists = lambda keys: (asked.append(len(keys)), exists(keys))[1]  # type: ignore[method-assign]
        assert engine.backend.batch_exists(KEYS) == 0
        assert asked == []
        deadline_s = time.monotonic() + PATIENCE_S
        while engine.backend.batch_exists(KEYS) != 8:  # read in the background, it is found to be in time
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert engine.load(KEYS) == [True] * 8
        engine.backend.close()
        writer.backend.close()
        way.close()


def test_a_pool_that_was_never_there_costs_nothing_but_hits(tmp_path: Path) -> None:
    engine = Engine({"pool": f"unix://{tmp_path / 'nobody.sock'}", "buffer_gb": 0.0, **ALWAYS_WORTH})
    assert engine.backend.batch_set_v1(KEYS, engine.pool.slots(range(8))) == [False] * 8
    assert engine.backend.batch_exists(KEYS) == 0
    engine.backend.close()


def test_a_disk_that_another_engine_has_open_is_left_out(folder: Path, server: PoolServer) -> None:
    first = Engine(on_disk(folder))
    second = Engine({**on_disk(folder), **in_pool(server)})
    assert [tier.tier for tier in second.backend.shelves["kv"].store.tiers] == [Tier.POOL]
    second.store(KEYS)
    assert second.load(KEYS) == [True] * 8
    first.backend.close()
    second.backend.close()


def test_a_folder_that_cannot_be_used_is_left_out(tmp_path: Path, server: PoolServer) -> None:
    (tmp_path / "file").touch()
    engine = Engine({**on_disk(tmp_path / "file"), **in_pool(server)})
    engine.store(KEYS)
    assert engine.load(KEYS) == [True] * 8
    engine.backend.close()


def test_all_servers_slabs_keep_within_the_folders_size(folder: Path) -> None:
    size = {"disk_gb": 0.001}  # 244 pages
    old = Engine(on_disk(folder, namespace="old", **size))
    old.store(KEYS)
    old.backend.close()
    new = Engine(on_disk(folder, namespace="new", **size))
    slabs = list(folder.glob(f"*/{SLAB_NAME}"))
    assert len(slabs) == 1, "what nobody has open makes room"
    assert new.store(KEYS) == [True] * 8
    late = Engine({**on_disk(folder, namespace="late", **size), "buffer_gb": 0.002})
    assert Tier.DISK not in late.backend.shelves["kv"].stats(), "what is in use stays"
    assert sum(slab.stat().st_size for slab in folder.glob(f"*/{SLAB_NAME}")) <= 1_000_000
    assert new.load(KEYS) == [True] * 8
    for engine in (new, late):
        engine.backend.close()


def test_a_folder_that_vanishes_costs_nothing_but_hits(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    engine.store(KEYS)
    shutil.rmtree(folder)
    assert engine.load(KEYS) == [True] * 8  # the open files live on
    engine.backend.close()
    engine = Engine(on_disk(folder))
    assert engine.backend.batch_exists(KEYS) == 0
    engine.backend.close()


def test_the_folder_is_free_again_after_a_detach(folder: Path) -> None:
    engine = Engine(on_disk(folder))
    engine.backend.close()
    os.close(lock_folder(the_slab(folder).parent))


def test_calls_from_all_of_the_engines_threads_while_it_is_detached(folder: Path, server: PoolServer) -> None:
    engine = Engine({**on_disk(folder), **in_pool(server)})
    engine.store(KEYS)
    begun = threading.Barrier(4)
    problems: list[BaseException] = []

    def call(kind: int) -> None:
        try:
            begun.wait()
            for _ in range(50):
                if kind == 0:
                    engine.backend.batch_exists(KEYS)
                elif kind == 1:
                    engine.load(KEYS)
                else:
                    engine.backend.batch_set_v1(KEYS, engine.pool.slots(range(8)))
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=call, args=(kind,)) for kind in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    engine.backend.close()
    for thread in threads:
        thread.join()
    assert problems == []
