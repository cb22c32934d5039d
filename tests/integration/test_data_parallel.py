"""A server with several data-parallel ranks is as many caches, each of which the router knows by itself."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.block import content_hashes, event_hash
from kvstore.events import BlocksStored
from kvstore.page import Tier
from kvstore.publisher import EventPublisher, PublisherOptions
from radix_index.base import Knowledge
from tests.gateways import Client, gateway_for
from tests.scripted_engine import Asked, ScriptedEngine

BLOCK = 16
RANKS = 3
PROMPT = list(range(100, 100 + 5 * BLOCK + 1))


def neighbours(count: int) -> int:
    """Return the first of so many free ports in a row."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            base = int(first.getsockname()[1])
            others = [socket.socket() for _ in range(count - 1)]
            try:
                for offset, other in enumerate(others, 1):
                    other.bind(("127.0.0.1", base + offset))
            except (OSError, OverflowError):
                continue
            finally:
                for other in others:
                    other.close()
            return base


@asynccontextmanager
async def _server() -> AsyncIterator[tuple[ScriptedEngine, list[EventPublisher]]]:
    """Be a server of several ranks, each of which can repeat three batches."""
    events, replays = neighbours(RANKS), neighbours(RANKS)
    options = [PublisherOptions(port=events + n, replay_port=replays + n, replay_batches=3) for n in range(RANKS)]
    publishers = [EventPublisher(each) for each in options]
    told = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": events,
        "replay_endpoint_port_base": replays,
        "topic": publishers[0].topic,
        "block_size": BLOCK,
        "dp_size": RANKS,
    }
    try:
        async with ScriptedEngine(info={"kv_events": told}) as engine:
            yield engine, publishers
    finally:
        for publisher in publishers:
            publisher.close()


@asynccontextmanager
async def _gateway(home: Path, engine: ScriptedEngine) -> AsyncIterator[Client]:
    async with gateway_for([engine], home, models=[{"name": "m", "tokenizer": "none"}]) as client:
        instances = client.gateway.fleet.instances
        await client.until(
            lambda: len(instances) == RANKS and all(i.knowledge is Knowledge.COMPLETE for i in instances.values())
        )
        yield client


def _holds(publisher: EventPublisher, tokens: list[int]) -> None:
    names = tuple(event_hash(digest) for digest in content_hashes(tokens, BLOCK))
    publisher.publish([BlocksStored(names, None, tuple(tokens[: len(names) * BLOCK]), BLOCK, Tier.DEVICE)])


async def _known(client: Client, *, blocks: int) -> None:
    """Wait until the index knows so many blocks."""
    await client.until(lambda: client.gateway.index.stats().blocks == blocks)


async def _sent(client: Client, engine: ScriptedEngine, tokens: list[int]) -> tuple[str | None, int, Asked]:
    body = {"model": "m", "prompt": tokens}
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        assert response.status == 200
        record = await client.record(response.headers["x-keepwarm-request-id"])
    assert record.decision is not None
    return record.instance, record.decision.predicted_hit_tokens, engine.asked[-1]


async def test_a_request_goes_to_the_rank_that_holds_its_prefix(tmp_path: Path) -> None:
    async with _server() as (engine, publishers), _gateway(tmp_path, engine) as client:
        assert list(client.gateway.fleet.instances) == ["e0", "e0.dp1", "e0.dp2"]
        prompts = [[rank, *PROMPT] for rank in range(RANKS)]
        for publisher, prompt in zip(publishers, prompts, strict=True):
            _holds(publisher, prompt)
        await _known(client, blocks=5 * RANKS)
        for rank, prompt in enumerate(prompts):
            instance, hits, asked = await _sent(client, engine, prompt)
            assert (instance, hits) == (["e0", "e0.dp1", "e0.dp2"][rank], 5 * BLOCK)
            assert asked.headers["x-override-routed-dp-rank"] == asked.headers["x-data-parallel-rank"] == str(rank)


async def test_ranks_go_and_come_with_their_server(tmp_path: Path) -> None:
    async with _server() as (engine, publishers), _gateway(tmp_path, engine) as client:
        _holds(publishers[1], PROMPT)
        await _known(client, blocks=5)
        await engine.close()
        fleet = client.gateway.fleet
        await client.until(lambda: not any(instance.takes_requests for instance in fleet.instances.values()))
        await client.until(lambda: not client.gateway.index.instances())
        await engine.open()
        await client.until(lambda: all(instance.takes_requests for instance in fleet.instances.values()))
        await _known(client, blocks=5)
        assert len(fleet.instances) == RANKS
        assert (await _sent(client, engine, PROMPT))[:2] == ("e0.dp1", 5 * BLOCK)


async def test_every_rank_is_known_again_by_the_next_gateway(tmp_path: Path) -> None:
    async with _server() as (engine, publishers):
        async with _gateway(tmp_path, engine) as client:
            for number in range(5):
                _holds(publishers[1], [number, *PROMPT])
                await _known(client, blocks=5 * (number + 1))
        async with _gateway(tmp_path, engine) as client:
            for number in range(5):
                assert (await _sent(client, engine, [number, *PROMPT]))[:2] == ("e0.dp1", 5 * BLOCK)
