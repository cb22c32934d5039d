"""A namespace that is given up while its pool is away is gone from it once it is back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import lmdb
import pytest
import redis

from kvstore.breaker import BreakerOptions
from kvstore.deadline import Allowance
from kvstore.page import Namespace
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.slab_index import SlabIndex
from tests.samples.pages import LAYOUT, buffers, chain, page

EAGER = BreakerOptions(first_probe_s=0.01, longest_probe_s=0.05)
SHORT = PoolOptions(read_s=Allowance(0.25), write_s=Allowance(0.5), breaker=EAGER)
MINE, OTHERS = chain(4, salt="mine"), chain(3, salt="other")
PAGES = [page(entry) for entry in MINE + OTHERS]


def open_tier(url: str) -> PoolTier:
    return PoolTier(LAYOUT, url, capacity_bytes=64 * LAYOUT.page_bytes, options=SHORT)


def test_a_namespace_is_forgotten_when_the_pool_is_back() -> None:
    with PoolServer(max_bytes=32 << 20) as server, redis.Redis.from_url(server.url) as client:
        tier, reader = open_tier(server.url), open_tier(server.url)
        assert all(tier.put(PAGES))
        pid = client.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert tier.forget(Namespace("mine")) == 0
            assert tier.forgetting == {Namespace("mine")}
        finally:
            os.kill(pid, signal.SIGCONT)
        assert tier.breaker.wait_closed(30)
        keys = [key for key, _ in MINE]
        assert tier.get(keys, buffers(4)) == [None] * 4  # at once, whether the server's turn has come or not
        while tier.forgetting:
            threading.Event().wait(0.01)
        assert reader.exists(keys) == [False] * 4
        assert reader.exists([key for key, _ in OTHERS]) == [True] * 3
        assert tier.stats().alarms == {}
        tier.close()
        reader.close()


def test_what_was_not_forgotten_by_closing_is_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    tier = open_tier(f"unix://{tmp_path}/none.sock")
    assert tier.forget(Namespace("mine")) == 0
    tier.close()
    tier.close()
    assert [record.levelname for record in caplog.records if "were not forgotten" in record.message] == ["ERROR"]


def test_what_a_disk_could_not_write_down_is_gone_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> DiskTier:
        options = DiskOptions(read_s=Allowance(60.0), write_s=Allowance(60.0), breaker=EAGER)
        return DiskTier(LAYOUT, tmp_path, capacity_bytes=16 * LAYOUT.page_bytes, options=options)

    def refuse(*_: object) -> None:
        raise lmdb.DiskError("no")

    tier = opened()
    assert all(tier.put(PAGES))
    with monkeypatch.context() as broken:
        broken.setattr(SlabIndex, "update", refuse)
        assert tier.forget(Namespace("mine")) == 4
        assert not tier.breaker.closed
    assert tier.breaker.wait_closed(30)
    tier.close()
    tier = opened()
    assert dict(tier.scan()) == dict(OTHERS)
    tier.close()
