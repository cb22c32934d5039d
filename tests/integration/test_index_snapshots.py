"""A gateway that comes back knows what the one before it knew: exactly, or it says that it does not."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.feeds import Feed
from gateway.snapshots import UNCLAIMED_S, IndexSnapshots, SnapshotOptions
from kvstore.block import routing_hashes, routing_seed
from kvstore.events import BlocksRemoved
from kvstore.page import Tier
from radix_index.base import Knowledge
from radix_index.index import RadixIndex
from radix_index.snapshot import Snapshot
from tests.gateways import Client, gateway_for
from tests.publishing_engine import BLOCK, PublishingEngine
from tests.scripted_engine import ScriptedEngine

BUFFER = 6
PROMPTS = [list(range(1000 * n, 1000 * n + 3 * BLOCK)) for n in range(1, 21)]


@asynccontextmanager
async def _engine(pool: str | None = None, *, replay_batches: int = BUFFER) -> AsyncIterator[PublishingEngine]:
    async with ScriptedEngine() as scripted:
        engine = PublishingEngine(scripted, pool, replay_batches=replay_batches)
        try:
            yield engine
        finally:
            engine.publisher.close()


@asynccontextmanager
async def _gateway(home: Path, *engines: PublishingEngine) -> AsyncIterator[Client]:
    models = [{"name": "m", "tokenizer": "none"}]
    routing = {"index_snapshot_s": 3600}  # only when a test, or the end, asks for one
    async with gateway_for([e.engine for e in engines], home, models=models, routing=routing) as client:
        yield client


def _held(client: Client, instance: str = "e0") -> list[int]:
    """Return how many blocks of each prompt the index claims."""
    index = client.gateway.index
    return [index.match(routing_hashes(p, BLOCK, routing_seed("m")))[instance].blocks for p in PROMPTS]


def _knowledge(client: Client, instance: str = "e0") -> Knowledge | None:
    return client.gateway.fleet.instances[instance].knowledge


async def _until(client: Client, held: list[int], knowledge: Knowledge = Knowledge.COMPLETE) -> None:
    await client.until(lambda: _held(client) == held and _knowledge(client) is knowledge)


async def _published(
    client: Client, engine: PublishingEngine, prompts: list[list[int]], tier: Tier = Tier.DEVICE
) -> list[tuple[int, ...]]:
    """Publish one by one what the engine holds, each once the gateway knows the one before: it buffers few."""
    await client.until(lambda: all(feed.knowledge is Knowledge.COMPLETE for feed in client.gateway.fleet.feeds()))
    names = []
    for prompt in prompts:
        names.append(engine.holds(prompt, tier))
        hashes = routing_hashes(prompt, BLOCK, routing_seed("m"))
        await client.until(lambda: any(m.blocks == 3 for m in client.gateway.index.match(hashes).values()))  # noqa: B023
    return names


async def test_what_the_engine_can_no_longer_repeat_is_known_from_the_file(tmp_path: Path) -> None:
    async with _engine() as engine:
        async with _gateway(tmp_path, engine) as client:
            names = await _published(client, engine, PROMPTS[:15])
            await _until(client, [3] * 15 + [0] * 5)
        engine.publisher.publish([BlocksRemoved(names[2][1:], Tier.DEVICE)])
        engine.holds(PROMPTS[15])
        async with _gateway(tmp_path, engine) as client:
            await _until(client, [3, 3, 1, *[3] * 13, *[0] * 4])
            engine.publisher.publish([BlocksRemoved(names[0], Tier.DEVICE)])
            await _until(client, [0, 3, 1, *[3] * 13, *[0] * 4])


async def test_a_gap_that_the_replay_cannot_close_is_told_and_nothing_false_is_claimed(tmp_path: Path) -> None:
    async with _engine() as engine:
        async with _gateway(tmp_path, engine) as client:
            names = await _published(client, engine, PROMPTS[:10])
            await _until(client, [3] * 10 + [0] * 10)
        engine.publisher.publish([BlocksRemoved(names[0], Tier.DEVICE)])
        for prompt in PROMPTS[10:18]:
            engine.holds(prompt)
        async with _gateway(tmp_path, engine) as client:
            await client.until(lambda: _knowledge(client) is Knowledge.PARTIAL)
            engine.holds(PROMPTS[18])
            await client.until(lambda: _held(client)[18] == 3)
            assert _knowledge(client) is Knowledge.PARTIAL
            assert _held(client) == [0] * 13 + [3] * 6 + [0]


@pytest.mark.parametrize("is_longer", [False, True], ids=["fewer batches than before", "as many and more"])
async def test_an_engine_that_restarted_in_between_is_read_anew(tmp_path: Path, is_longer: bool) -> None:
    async with _engine(replay_batches=10_000) as engine:
        async with _gateway(tmp_path, engine) as client:
            for prompt in PROMPTS[:5]:
                engine.holds(prompt)
            await _until(client, [3] * 5 + [0] * 15)
        engine.restarts_in_place()
        for prompt in PROMPTS[10:18] if is_longer else PROMPTS[10:12]:
            engine.holds(prompt)
        async with _gateway(tmp_path, engine) as client:
            await _until(client, [0] * 10 + ([3] * 8 + [0] * 2 if is_longer else [3] * 2 + [0] * 8))


@pytest.mark.parametrize("damage", ["cut", "a bit", "foreign", "another version", "empty"])
async def test_a_file_that_is_no_whole_snapshot_is_ignored_and_told_once(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _engine() as engine:
        async with _gateway(tmp_path, engine) as client:
            for prompt in PROMPTS[:3]:
                engine.holds(prompt)
            await _until(client, [3] * 3 + [0] * 17)
        path = tmp_path / "index.snapshot"
        data = path.read_bytes()
        path.write_bytes(
            {
                "cut": data[:-5],
                "a bit": data[:100] + bytes([data[100] ^ 1]) + data[101:],
                "foreign": b"\x7fELF" + data,
                "another version": data.replace(b"index 1", b"index 2"),
                "empty": b"",
            }[damage]
        )
        with caplog.at_level(logging.WARNING, logger="gateway.snapshots"):
            async with _gateway(tmp_path, engine) as client:
                await _until(client, [3] * 3 + [0] * 17)
                async with client.session.get(f"{client.url}/metrics") as response:
                    assert "keepwarm_index_snapshots_ignored_total 1.0" in await response.text()
        assert [record.name for record in caplog.records] == ["gateway.snapshots"]
        async with _gateway(tmp_path, engine) as client:  # a good one took its place
            await _until(client, [3] * 3 + [0] * 17)
            async with client.session.get(f"{client.url}/metrics") as response:
                assert "keepwarm_index_snapshots_ignored_total 0.0" in await response.text()


async def test_a_source_that_is_another_by_now_gets_nothing_of_the_snapshot(tmp_path: Path) -> None:
    async with _engine() as engine:
        async with _gateway(tmp_path, engine) as client:
            engine.holds(PROMPTS[0])
            await _until(client, [3] + [0] * 19)
        engine.lives_anew()  # at other ports
        engine.holds(PROMPTS[1])
        async with _gateway(tmp_path, engine) as client:
            await _until(client, [0, 3] + [0] * 18)
        engine.engine.info = {}  # publishes nothing any more
        async with _gateway(tmp_path, engine) as client:
            await client.until(lambda: client.gateway.fleet.instances["e0"].predicted is not None)
            assert _held(client) == [0] * 20


async def test_an_instance_that_is_away_at_the_start_is_not_forgotten_by_the_next_snapshot(tmp_path: Path) -> None:
    async with _engine() as engine, _engine() as other:
        async with _gateway(tmp_path, engine, other) as client:
            await _published(client, engine, PROMPTS[:9])
            await _until(client, [3] * 9 + [0] * 11)
        await engine.engine.close()
        models = [{"name": "m", "tokenizer": "none"}]
        engines = [engine.engine, other.engine]
        async with gateway_for(engines, tmp_path, models=models, ready_count=1) as client:
            other.holds(PROMPTS[0])
            await client.until(lambda: _held(client, "e1")[0] == 3)
            assert _held(client) == [3] * 9 + [0] * 11  # a claim, of an instance that takes no requests
        await engine.engine.open()
        async with _gateway(tmp_path, engine, other) as client:
            await _until(client, [3] * 9 + [0] * 11)


async def test_a_source_that_is_being_proved_keeps_its_place_in_the_file(tmp_path: Path) -> None:
    async with _engine() as engine:
        async with _gateway(tmp_path, engine) as client:
            await _published(client, engine, PROMPTS[:9])
        path = tmp_path / "index.snapshot"
        before = path.read_bytes()
        async with _gateway(tmp_path, engine) as client:
            (feed,) = client.gateway.fleet.feeds()
            feed._is_unproved = True
            assert not await client.gateway.snapshots.save(client.gateway.fleet.feeds)
            assert path.read_bytes() == before
            feed._is_unproved = False
            assert await client.gateway.snapshots.save(client.gateway.fleet.feeds)


async def test_one_that_would_be_too_long_or_has_no_room_leaves_the_old_one_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _engine() as engine, _gateway(tmp_path, engine) as client:
        await _published(client, engine, PROMPTS[:2])
        feeds, index = client.gateway.fleet.feeds, client.gateway.index
        assert await client.gateway.snapshots.save(feeds)
        path = tmp_path / "index.snapshot"
        before = path.read_bytes()
        short = IndexSnapshots(path, index, lambda: 1.0, SnapshotOptions(byte_limit=100))
        nowhere = IndexSnapshots(tmp_path / "none" / "index.snapshot", index, lambda: 1.0)
        for snapshots in (short, nowhere):
            assert not await snapshots.save(feeds)
            assert not await snapshots.save(feeds)
            assert snapshots.stats.failed == 2
        assert path.read_bytes() == before
        assert len([r for r in caplog.records if r.name == "gateway.snapshots" and r.levelname == "WARNING"]) == 2


async def test_what_nobody_comes_for_is_forgotten(tmp_path: Path) -> None:
    async with _engine() as engine, _gateway(tmp_path, engine) as client:
        await _published(client, engine, PROMPTS[:2])
    now = 1000.0
    index = RadixIndex()
    snapshots = IndexSnapshots(tmp_path / "index.snapshot", index, lambda: now)
    await snapshots.restore({"e0"})
    assert index.stats().blocks == 6
    now += UNCLAIMED_S + 1
    assert await snapshots.save(list)
    assert index.instances() == {}
    assert not Snapshot((tmp_path / "index.snapshot").read_bytes()).header.sources


async def test_a_pool_is_kept_with_all_that_speak_of_it(tmp_path: Path) -> None:
    async with _engine("p") as engine, _engine("p") as other:
        async with _gateway(tmp_path, engine, other) as client:
            (names,) = await _published(client, engine, PROMPTS[:1], Tier.POOL)
            await _published(client, other, PROMPTS[1:9], Tier.POOL)
            await _until(client, [3] * 9 + [0] * 11)
        engine.publisher.publish([BlocksRemoved(names[1:], Tier.POOL)])
        async with _gateway(tmp_path, engine, other) as client:
            await _until(client, [1] + [3] * 8 + [0] * 11)
            assert _held(client, "e1") == _held(client)


class InDoubt:
    """A feed that shares a pool and of which nothing is known for now."""

    resets, pool, is_settling = 0, "p", False

    def state(self) -> None:
        return None


async def test_a_pool_is_left_out_while_one_that_speaks_of_it_is_in_doubt(tmp_path: Path) -> None:
    async with _engine("p") as engine, _gateway(tmp_path, engine) as client:
        await _published(client, engine, PROMPTS[:2], Tier.POOL)
        feeds: list[Any] = [*client.gateway.fleet.feeds(), InDoubt()]
        assert await client.gateway.snapshots.save(lambda: feeds)
        snapshot = Snapshot((tmp_path / "index.snapshot").read_bytes())
        (state,) = snapshot.header.sources
        assert (state.keeps_pool, state.knowledge) == (False, "partial")
        assert len(snapshot) == 0


async def test_a_snapshot_is_void_when_a_source_was_forgotten_while_it_was_written(tmp_path: Path) -> None:
    async with _engine() as engine, _gateway(tmp_path, engine) as client:
        engine.holds(PROMPTS[0])
        await _until(client, [3] + [0] * 19)
        snapshots, (feed,) = client.gateway.snapshots, client.gateway.fleet.feeds()
        asked = 0

        def feeds() -> list[Feed]:
            nonlocal asked
            asked += 1
            if asked == 2:  # all is written, and does it still hold?
                feed._reset()
            return [feed]

        assert not await snapshots.save(feeds)
        assert snapshots.stats.void == 1
        assert not (tmp_path / "index.snapshot").exists()
