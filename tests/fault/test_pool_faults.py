"""What can happen to a pool: nothing that it hands out is ever wrong, and nobody waits for it twice."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from gateway.pool import keep_alive, own_pool
from kvstore import codec
from kvstore.breaker import BreakerOptions
from kvstore.deadline import Allowance
from kvstore.errors import MediumError
from kvstore.page import PageKey
from kvstore.tiers.base import PagesRemoved, TierChange
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data, strangers

PAGES = chain(4)
KEYS = [key for key, _ in PAGES]
RIGHT = [page_data(key) for key in KEYS]
PATIENT = BreakerOptions(first_probe_s=3600.0)
EAGER = BreakerOptions(first_probe_s=0.01, longest_probe_s=0.05)
SHORT = PoolOptions(read_s=Allowance(0.25), write_s=Allowance(0.5), breaker=EAGER)


@pytest.fixture
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=32 << 20) as started:
        yield started


@pytest.fixture
def client(server: PoolServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as connected:
        yield connected


def open_tier(url: str, *, pages: int = 64, options: PoolOptions = SHORT) -> PoolTier:
    return PoolTier(LAYOUT, url, capacity_bytes=pages * LAYOUT.page_bytes, options=options)


def reads(tier: PoolTier, keys: list[PageKey]) -> list[bytes | None]:
    out = buffers(len(keys))
    return [bytes(b) if found is not None else None for b, found in zip(out, tier.get(keys, out), strict=True)]


def name_of(client: redis.Redis, key: PageKey) -> bytes:
    return next(name for name in client.scan_iter() if name.endswith(key[16:].hex().encode()))


def refuse_to_connect(tier: PoolTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any attempt to speak to the server an error of the test."""

    def asked(deadline_s: float) -> None:
        raise AssertionError("the server was asked while out of use")

    for server in tier._server._servers.masters():
        monkeypatch.setattr(server, "take", asked)


def test_two_engines_share_their_pages(server: PoolServer) -> None:
    first, second = open_tier(server.url), open_tier(server.url)
    assert all(first.put([page(entry) for entry in PAGES]))
    assert reads(second, KEYS) == RIGHT
    assert second.put([page(PAGES[0])]) == [True]
    assert (second.stats().puts, second.stats().used_bytes) == (0, 0)  # it was there already, and is the other's
    first.close()
    assert reads(second, KEYS) == RIGHT
    second.close()


def test_a_paused_server_costs_one_deadline_and_comes_back(
    server: PoolServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(server.url, options=replace(SHORT, breaker=PATIENT))
    tier.put([page(entry) for entry in PAGES])
    pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert reads(tier, KEYS) == [None] * 4
        assert not tier.breaker.closed
        with monkeypatch.context() as patched:
            refuse_to_connect(tier, patched)
            assert reads(tier, KEYS) == [None] * 4
            assert tier.exists(KEYS) == [False] * 4
            assert tier.put([page(PAGES[0])]) == [False]
            assert list(tier.scan()) == []
        assert tier.stats().misses == {"unavailable": 8}
        assert tier.stats().dropped == 1
    finally:
        os.kill(pid, signal.SIGCONT)
        tier.close()


def test_a_paused_server_is_used_again_once_it_answers(server: PoolServer, client: redis.Redis) -> None:
    tier = open_tier(server.url)
    tier.put([page(entry) for entry in PAGES])
    pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert reads(tier, KEYS) == [None] * 4
        assert not tier.breaker.closed
    finally:
        os.kill(pid, signal.SIGCONT)
    assert tier.breaker.wait_closed(30)
    assert reads(tier, KEYS) == RIGHT
    assert tier.stats().alarms == {}
    tier.close()


def test_a_killed_server_is_a_miss_and_its_successor_is_used() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tier = open_tier(f"redis://127.0.0.1:{port}")
    with PoolServer(max_bytes=32 << 20, port=port) as server:
        assert all(tier.put([page(entry) for entry in PAGES]))
        with redis.Redis.from_url(server.url) as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)
        assert reads(tier, KEYS) == [None] * 4
        assert tier.put([page(PAGES[0])]) == [False]
        assert not tier.breaker.closed
    with PoolServer(max_bytes=32 << 20, port=port):
        assert tier.breaker.wait_closed(30)
        assert reads(tier, KEYS) == [None] * 4  # the successor is empty
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT
        assert tier.stats().alarms == {}
        tier.close()


def test_a_killed_server_starts_again_at_its_url_and_its_tier_comes_back() -> None:
    with PoolServer(max_bytes=32 << 20) as server:
        url, tier = server.url, open_tier(server.url)
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert server.is_running
        _kill(server)
        assert not server.is_running
        assert reads(tier, KEYS) == [None] * 4
        server.restart()
        assert server.url == url
        assert server.is_running
        assert tier.breaker.wait_closed(30)
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT
        tier.close()
    assert not server.is_running
    assert not Path(url.removeprefix("unix://")).parent.exists()
    with pytest.raises(MediumError, match="not started"):
        server.restart()


def test_the_gateways_pool_is_kept_alive() -> None:
    async def scene() -> None:
        async with AsyncExitStack() as stack:
            server = await own_pool(1 << 24, stack)
            assert server is not None
            keeping = asyncio.create_task(keep_alive(server, look_s=0.01))
            for _ in range(2):
                _kill(server)
                async with asyncio.timeout(30):
                    while not _answers(server.url):  # noqa: ASYNC110 - nothing tells
                        await asyncio.sleep(0.01)
            keeping.cancel()
            await asyncio.wait({keeping})

    asyncio.run(scene())


def _kill(server: PoolServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        pid = client.info("server")["process_id"]
        os.kill(pid, signal.SIGKILL)
        while _answers(server.url):
            pass
    while server.is_running:
        pass


def _answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def test_a_server_that_is_not_there_is_a_miss() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        tier = open_tier(f"redis://127.0.0.1:{taken.getsockname()[1]}")
        assert reads(tier, KEYS) == [None] * 4
        assert not tier.breaker.closed
        tier.close()


def test_what_is_not_the_url_of_a_server_is_refused() -> None:
    with pytest.raises(MediumError, match="http://host/") as refused:
        open_tier("http://user:secret@host/")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda value: value[:-1], "length"),
        (lambda value: value + b"x", "length"),
        (lambda value: value[:40], "record"),
        (lambda value: b"", "record"),
        (lambda value: b"x" + value[1:], "record"),
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), "checksum"),
    ],
    ids=["cut", "longer", "torn header", "empty", "no header", "flipped bit"],
)
def test_a_value_that_is_not_the_page_is_a_miss_and_deleted(
    server: PoolServer, client: redis.Redis, damage: object, reason: str
) -> None:
    tier = open_tier(server.url)
    tier.put([page(entry) for entry in PAGES])
    name = name_of(client, KEYS[1])
    client.set(name, damage(client.get(name)))
    assert reads(tier, KEYS) == [RIGHT[0], None, RIGHT[2], RIGHT[3]]
    assert tier.stats().alarms == {reason: 1}
    assert client.exists(name) == 0
    tier.close()


def test_another_pages_value_and_another_type_are_misses(server: PoolServer, client: redis.Redis) -> None:
    tier = open_tier(server.url)
    tier.put([page(entry) for entry in PAGES])
    client.set(name_of(client, KEYS[0]), client.get(name_of(client, KEYS[1])))
    listed = name_of(client, KEYS[2])
    client.delete(listed)
    client.lpush(listed, "not a page")
    assert reads(tier, KEYS) == [None, RIGHT[1], None, RIGHT[3]]
    assert tier.stats().alarms == {"record": 2}
    tier.close()


def test_a_value_of_an_older_format_is_a_miss(server: PoolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(server.url)
    monkeypatch.setattr(codec, "RECORD_VERSION", codec.RECORD_VERSION - 1)
    tier.put([page(PAGES[0])])
    monkeypatch.undo()
    assert reads(tier, KEYS[:1]) == [None]
    assert tier.stats().alarms == {"format": 1}
    tier.close()


def test_the_accounts_follow_a_server_that_evicts(server: PoolServer, client: redis.Redis) -> None:
    changes: list[TierChange] = []
    tier = open_tier(server.url)
    tier.on_change = changes.append
    tier.put([page(entry) for entry in PAGES])
    client.delete(name_of(client, KEYS[3]))
    assert reads(tier, KEYS) == [*RIGHT[:3], None]
    assert tier.stats().used_bytes == 3 * LAYOUT.page_bytes
    assert changes[-1] == PagesRemoved(tier.tier, (KEYS[3],))
    assert tier.put([page(PAGES[3])]) == [True]
    assert reads(tier, KEYS) == RIGHT
    tier.close()


def test_a_page_that_is_put_while_another_reader_misses_it_stays_in_the_accounts(
    server: PoolServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(server.url)
    tier.put([page(PAGES[0])])
    client.delete(name_of(client, KEYS[0]))
    get = tier._server.get

    def get_and_be_overtaken(*arguments: object, **more: bool) -> list[object]:
        replies = get(*arguments, **more)
        monkeypatch.undo()
        assert tier.put([page(PAGES[0])]) == [True]
        return replies

    monkeypatch.setattr(tier._server, "get", get_and_be_overtaken)
    assert reads(tier, KEYS[:1]) == [None]
    assert tier.stats().used_bytes == LAYOUT.page_bytes
    assert reads(tier, KEYS[:1]) == RIGHT[:1]
    tier.close()


def test_a_server_short_of_memory_evicts_and_nothing_is_wrong(server: PoolServer, client: redis.Redis) -> None:
    tier = open_tier(server.url, pages=4096)
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + (2 << 20))
    pages = strangers(1000)
    for entry in pages:
        tier.put([page(entry)])
    got = reads(tier, [key for key, _ in pages])
    assert [read for (key, _), read in zip(pages, got, strict=True) if read not in (None, page_data(key))] == []
    there = sum(read is not None for read in got)
    assert 0 < there < 512
    assert tier.stats().used_bytes == there * LAYOUT.page_bytes
    tier.close()


def test_a_full_server_that_does_not_evict_drops_writes_and_stays_in_use(
    server: PoolServer, client: redis.Redis
) -> None:
    tier = open_tier(server.url)
    tier.put([page(PAGES[0])])
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    assert tier.put([page(PAGES[1])]) == [False]
    assert tier.breaker.closed
    assert reads(tier, KEYS[:2]) == [RIGHT[0], None]
    assert tier.stats().dropped == 1
    tier.close()


def test_a_salt_longer_than_any_header_buffer_is_stored_all_the_same(server: PoolServer) -> None:
    tier = open_tier(server.url)
    entry = chain(1, salt="s" * 5000)[0]
    assert tier.put([page(entry)]) == [True]
    assert reads(tier, [entry[0]]) == [page_data(entry[0])]
    assert list(tier.scan()) == [entry]
    tier.close()


def test_a_cluster_is_reached_by_its_own_url() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = {"cluster-enabled": "yes", "cluster-port": str(port + 10000 if port < 55000 else port - 10000)}
    with PoolServer(max_bytes=32 << 20, port=port, settings=cluster) as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                pass
        tier = open_tier(f"redis+cluster://127.0.0.1:{port}")
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT
        assert tier.exists([*KEYS, strangers(1, first_token=9000)[0][0]]) == [True] * 4 + [False]
        assert dict(tier.scan()) == dict(PAGES)
        assert tier.remove(KEYS[:1]) == 1
        tier.clear()
        assert list(tier.scan()) == []
        tier.close()


def test_the_server_ends_with_its_owner_however_that_ends() -> None:
    owner_code = (
        "import redis, sys; from kvstore.tiers.pool_server import PoolServer;"
        "server = PoolServer(max_bytes=1 << 24).start();"
        "print(redis.Redis.from_url(server.url).info('server')['process_id'], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", owner_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server_fd = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    ended = select.poll()
    ended.register(server_fd, select.POLLIN)
    assert ended.poll(30_000), "the server outlived its owner"
    os.close(server_fd)


def test_a_stopped_server_leaves_nothing() -> None:
    server = PoolServer(max_bytes=32 << 20).start()
    folder = Path(server.url.removeprefix("unix://")).parent
    assert folder.is_dir()
    server.stop()
    server.stop()
    assert not folder.exists()
    with pytest.raises(MediumError, match="not running"):
        _ = server.url


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(MediumError, match="no-such-setting"):
        PoolServer(max_bytes=1 << 24, settings={"no-such-setting": "1"}).start()
