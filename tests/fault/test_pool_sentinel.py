"""A real sentinel over a master and its replica: the pool follows when they change places."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from kvstore.breaker import BreakerOptions
from kvstore.deadline import Allowance
from kvstore.errors import MediumError
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer, server_binary
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.pool_url import PoolKind, parse_pool_url
from tests.samples.pages import LAYOUT, buffers, page, page_data, strangers

PAGES = strangers(6)
KEYS = [key for key, _ in PAGES]
OPTIONS = PoolOptions(
    read_s=Allowance(1.0), write_s=Allowance(2.0), breaker=BreakerOptions(first_probe_s=0.02, longest_probe_s=0.1)
)
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def call(port: int, *words: str | int) -> object:
    with redis.Redis(port=port, socket_timeout=PATIENCE_S) as client:
        return client.execute_command(*words)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass  # not yet
        assert time.monotonic() < deadline_s, "it did not come to that"


@dataclass
class Watched:
    """Two servers and the sentinel that watches them."""

    ports: list[int]
    sentinel_port: int

    def master_port(self) -> int:
        answer = call(self.sentinel_port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "pages")
        return int(answer[1])


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        ports = [free_port(), free_port()]
        for port in ports:
            settings = {"repl-diskless-sync-delay": "0"}
            stack.enter_context(PoolServer(max_bytes=32 << 20, port=port, settings=settings))
        call(ports[1], "REPLICAOF", "127.0.0.1", ports[0])
        until(lambda: call(ports[1], "ROLE")[3] == b"connected")
        sentinel_port = free_port()
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {sentinel_port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor pages 127.0.0.1 {ports[0]} 1\nsentinel failover-timeout pages 10000\n"
        )
        process = subprocess.Popen([server_binary(), config, "--sentinel"], stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        until(lambda: len(call(sentinel_port, "SENTINEL", "REPLICAS", "pages")) == 1)
        yield Watched(ports, sentinel_port)


def test_the_pool_follows_its_master(watched: Watched) -> None:
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{watched.sentinel_port}/pages"  # nobody is at the first
    tier = PoolTier(LAYOUT, url, capacity_bytes=64 * LAYOUT.page_bytes, options=OPTIONS)
    assert all(tier.put([page(entry) for entry in PAGES]))
    call(watched.ports[0], "WAIT", 1, int(PATIENCE_S * 1000))
    until(lambda: call(watched.sentinel_port, "SENTINEL", "FAILOVER", "pages"))
    until(lambda: watched.master_port() == watched.ports[1])
    until(lambda: call(watched.ports[0], "ROLE")[0] == b"slave")
    newcomers = strangers(3, first_token=90_000)
    until(lambda: all(tier.put([page(entry) for entry in newcomers])))  # its old master takes no writes: it looks again
    assert call(watched.ports[1], "DBSIZE") == len(PAGES) + len(newcomers)
    out = buffers(len(KEYS))
    assert None not in tier.get(KEYS, out)
    assert [bytes(buffer) for buffer in out] == [page_data(key) for key in KEYS]
    assert tier.stats().alarms == {}
    tier.close()


def test_where_no_sentinel_answers_the_pool_is_out_of_use() -> None:
    tier = PoolTier(LAYOUT, "redis+sentinel://127.0.0.1:1/pages", capacity_bytes=1 << 20, options=OPTIONS)
    assert tier.exists(KEYS) == [False] * len(KEYS)
    assert not tier.breaker.closed
    tier.close()


def test_urls_are_taken_apart() -> None:
    url = parse_pool_url("redis+sentinel://me:s%20t@a,b:5,[::1]:6/pages/3")
    assert (url.kind, url.service) == (PoolKind.SENTINEL, "pages")
    assert [(server.host, server.port) for server in url.servers] == [("a", 26379), ("b", 5), ("::1", 6)]
    assert {(server.username, server.password, server.database) for server in url.servers} == {("me", "s t", 3)}
    single = parse_pool_url("rediss://:secret@host/2").servers[0]
    assert (single.host, single.port, single.password, single.database, single.tls) == ("host", 6379, "secret", 2, True)
    assert parse_pool_url("unix:///run/a%20b.sock?db=1").servers[0].path == "/run/a b.sock"
    for wrong in ("redis+sentinel://host", "redis://a,b", "redis://host/x", "ftp://host"):
        with pytest.raises(MediumError):
            parse_pool_url(wrong)
