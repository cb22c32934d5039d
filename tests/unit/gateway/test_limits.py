"""Limits: counted in shared memory and in Redis alike, told in headers, given back, and what happens in an outage."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from engine_adapter.embedded.launch import free_port
from gateway.limits import shared_counts
from gateway.limits.limiter import Limited, Limiter, limit_headers
from gateway.limits.redis_counts import RedisCounts
from gateway.limits.rules import CountStore, CountsUnavailable, Level, LimitRule, Outage, Resource, Take, Taken
from gateway.limits.shared_counts import SharedCounts
from kvstore.tiers.pool_server import PoolServer

MINUTE_NS = 60 * 10**9
NOW_NS = 1_795_000_000 * 10**9 // MINUTE_NS * MINUTE_NS


def rule(resource: Resource, amount: int, level: Level = Level.KEY, outage: Outage = Outage.ADMIT) -> LimitRule:
    return LimitRule(level, "k", resource, amount, outage)


@asynccontextmanager
async def opened(store: CountStore) -> AsyncIterator[Limiter]:
    await store.open()
    try:
        yield Limiter(store)
    finally:
        await store.close()


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], CountStore]]:
    if request.param == "memory":
        yield lambda: SharedCounts(tmp_path / "counts", deadline_s=5.0)
        return
    with PoolServer(max_bytes=32 << 20) as server:
        yield lambda: RedisCounts(server.url, deadline_s=5.0)


@pytest.mark.requirement("R22")
async def test_all_rules_are_taken_under_or_none(make: Callable[[], CountStore]) -> None:
    own, team = rule(Resource.REQUESTS, 5), rule(Resource.REQUESTS, 2, Level.TEAM)
    async with opened(make()) as limiter:
        await limiter.enter([own, team], 0)
        await limiter.enter([own, team], 0)
        for _ in range(3):
            with pytest.raises(Limited, match="2 requests a minute for this team"):
                await limiter.enter([own, team], 0)
        passages = [await limiter.enter([own], 0) for _ in range(3)]  # the three refusals took nothing of the key's
        assert [passage.taken[0].left for passage in passages] == [2, 1, 0]
        with pytest.raises(Limited) as caught:
            await limiter.enter([own], 0)
        assert caught.value.retry_after_s is not None
        assert 1 <= caught.value.retry_after_s <= 60


@pytest.mark.requirement("R22")
async def test_tokens_are_settled_at_what_they_came_to_and_places_given_back(make: Callable[[], CountStore]) -> None:
    tokens, places = rule(Resource.TOKENS, 1000), rule(Resource.CONCURRENCY, 1)
    async with opened(make()) as limiter:
        passage = await limiter.enter([tokens, places], 900)
        with pytest.raises(Limited, match="at once"):
            await limiter.enter([places], 0)
        with pytest.raises(Limited, match="1000 tokens a minute"):
            await limiter.enter([tokens], 200)
        passage.settle(100)
        passage.settle(100)  # once only
        again = await limiter.enter([tokens, places], 850)
        assert [taken.used for taken in again.taken] == [950, 1]
        again.settle(None)  # nobody knows: what was taken stands
        with pytest.raises(Limited):
            await limiter.enter([tokens], 100)
        await limiter.enter([places], 0)
        with pytest.raises(Limited) as caught:
            await limiter.enter([tokens], 2000)
        assert caught.value.retry_after_s is None  # it will not fit in any minute


@pytest.mark.requirement("R22")
async def test_a_refund_goes_to_the_window_that_was_taken_from(tmp_path: Path) -> None:
    now_ns = NOW_NS + MINUTE_NS - 1
    store = SharedCounts(tmp_path / "counts", clock=lambda: now_ns)
    async with opened(store) as limiter:
        tokens = rule(Resource.TOKENS, 100)
        old = await limiter.enter([tokens], 100)
        now_ns += 1
        new = await limiter.enter([tokens], 60)
        assert new.taken[0].start_ns - old.taken[0].start_ns == MINUTE_NS
        old.settle(0)
        assert (await limiter.enter([tokens], 40)).taken[0].used == 100
        with pytest.raises(Limited):
            await limiter.enter([tokens], 1)


async def test_a_worker_that_comes_again_finds_its_places_free_and_others_taken(tmp_path: Path) -> None:
    places = rule(Resource.CONCURRENCY, 2)

    def worker(number: int) -> SharedCounts:
        return SharedCounts(tmp_path / "counts", worker=number, workers=2)

    first, second = worker(0), worker(1)
    await first.open()
    await second.open()
    await Limiter(first).enter([places], 0)
    await Limiter(second).enter([places], 0)
    with pytest.raises(Limited):
        await Limiter(first).enter([places], 0)
    await first.close()  # as if it had been killed: nothing was settled
    first = worker(0)
    await first.open()
    await Limiter(first).enter([places], 0)
    with pytest.raises(Limited):
        await Limiter(second).enter([places], 0)
    await first.close()
    await second.close()


async def test_a_full_table_is_an_outage_and_old_counts_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_counts, "PLACES", 64)
    now_ns = NOW_NS
    async with opened(SharedCounts(tmp_path / "counts", clock=lambda: now_ns)) as limiter:
        rules = [LimitRule(Level.KEY, f"k{n}", Resource.REQUESTS, 1, Outage.DENY) for n in range(500)]
        for one in rules:
            try:
                await limiter.enter([one], 0)
            except Limited:
                pass
        assert limiter.status.denied_by_outage > 400
        assert limiter.status.admitted >= 32
        now_ns += 3 * MINUTE_NS
        assert len((await limiter.enter([rules[-1]], 0)).taken) == 1


async def test_a_lock_that_is_held_is_waited_for_no_longer_than_the_deadline(tmp_path: Path) -> None:
    store = SharedCounts(tmp_path / "counts", deadline_s=0.05)
    async with opened(store):
        holder = os.open(tmp_path / "counts", os.O_RDWR)
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(CountsUnavailable):
            await store.reserve([Take(rule(Resource.REQUESTS, 1), 1)])
        os.close(holder)
        assert (await store.reserve([Take(rule(Resource.REQUESTS, 1), 1)])).full is None


@pytest.mark.requirement("R17")
async def test_a_silent_redis_costs_its_deadline_once_and_one_line_each_way(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    caplog.set_level(logging.WARNING, "gateway.limits.redis_counts")
    with PoolServer(max_bytes=32 << 20, port=port) as server, Redis.from_url(server.url) as client:
        pid = int(client.info("server")["process_id"])
        store = RedisCounts(f"redis://127.0.0.1:{port}", deadline_s=0.5)
        async with opened(store) as limiter:
            lenient, strict = rule(Resource.REQUESTS, 100), rule(Resource.REQUESTS, 100, outage=Outage.DENY)
            assert (await limiter.enter([lenient], 0)).taken
            os.kill(pid, signal.SIGSTOP)
            try:
                passages = await asyncio.gather(*(limiter.enter([lenient], 0) for _ in range(50)))
                assert not any(passage.taken for passage in passages)  # let through, uncounted
                for _ in range(50):
                    with pytest.raises(Limited, match="cannot be judged"):
                        await limiter.enter([strict], 0)
                assert store.status.outages == 1  # the deadline was waited for once, not a hundred times
            finally:
                os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(20):
                while not (await limiter.enter([lenient], 0)).taken:  # noqa: ASYNC110 - it comes back by itself
                    await asyncio.sleep(0.05)
        assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
        assert caplog.records[1].message == "limits are counted again"


@pytest.mark.requirement("R17")
async def test_after_an_outage_those_at_once_are_those_that_are_under_way() -> None:
    places = rule(Resource.CONCURRENCY, 2)
    with PoolServer(max_bytes=32 << 20) as server, Redis.from_url(server.url) as client:
        pid = int(client.info("server")["process_id"])
        async with (
            opened(RedisCounts(server.url, deadline_s=0.5)) as limiter,
            opened(RedisCounts(server.url, deadline_s=5.0)) as other,
        ):
            ends, stays = [await limiter.enter([places], 0) for _ in range(2)]
            os.kill(pid, signal.SIGSTOP)
            try:
                unheard = await limiter.enter([places], 0)  # of which the server may hear yet
                assert not unheard.taken
                ends.settle(None)
            finally:
                os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(20):
                while not (last := await limiter.enter([places], 0)).taken:  # noqa: ASYNC110 - it comes back by itself
                    await asyncio.sleep(0.05)
            with pytest.raises(Limited):
                await other.enter([places], 0)
            for passage in (unheard, stays, last):
                passage.settle(None)
            assert (await limiter.enter([places], 0)).taken[0].used == 1


async def test_scripts_are_loaded_again_after_the_server_forgot_them() -> None:
    with PoolServer(max_bytes=32 << 20) as server, Redis.from_url(server.url) as client:
        async with opened(RedisCounts(server.url, deadline_s=5.0)) as limiter:
            await limiter.enter([rule(Resource.REQUESTS, 2)], 0)
            client.script_flush()
            assert (await limiter.enter([rule(Resource.REQUESTS, 2)], 0)).taken[0].used == 2


async def test_a_replica_that_died_gives_its_places_back_when_it_has_said_nothing_for_long() -> None:
    places = rule(Resource.CONCURRENCY, 1)
    with PoolServer(max_bytes=32 << 20) as server, Redis.from_url(server.url) as client:
        async with (
            opened(RedisCounts(server.url, deadline_s=5.0)) as dead,
            opened(RedisCounts(server.url, deadline_s=5.0)) as other,
        ):
            await dead.enter([places], 0)
            with pytest.raises(Limited):
                await other.enter([places], 0)
            (alive,) = [
                key for key in client.keys("{keepwarm-limits}:alive:*")
                if client.hget("{keepwarm-limits}:concurrency|key|k", key.rpartition(b":")[2])
            ]  # fmt: skip
            client.delete(alive)  # as the server does after thirty seconds
            assert (await other.enter([places], 0)).taken


async def test_requests_that_come_together_share_round_trips() -> None:
    with PoolServer(max_bytes=32 << 20) as server:
        store = RedisCounts(server.url, deadline_s=5.0)
        async with opened(store) as limiter:
            await asyncio.gather(*(limiter.enter([rule(Resource.REQUESTS, 1000)], 0) for _ in range(500)))
            assert store.status.calls == 500
            assert store.status.round_trips < 50


def test_headers_are_of_the_tightest_limit_of_each_kind() -> None:
    taken = [
        Taken(Take(rule(Resource.REQUESTS, 10), 1), NOW_NS, 3),
        Taken(Take(rule(Resource.REQUESTS, 100, Level.TEAM), 1), NOW_NS, 99),
        Taken(Take(rule(Resource.TOKENS, 1000), 10), NOW_NS, 1500),
        Taken(Take(rule(Resource.CONCURRENCY, 4), 1), 0, 4),
    ]
    assert limit_headers(taken, NOW_NS + 59_500 * 10**6) == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "500ms",
        "anthropic-ratelimit-requests-limit": "100",
        "anthropic-ratelimit-requests-remaining": "1",
        "anthropic-ratelimit-requests-reset": "2026-11-18T11:07:00Z",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "500ms",
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-11-18T11:07:00Z",
        "x-ratelimit-limit-concurrency": "4",
        "x-ratelimit-remaining-concurrency": "0",
    }
