"""Routing follows the engines' real event sockets: what they hold, what they lose, and when they are gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine_adapter.embedded.publisher import EventPublisher, PublisherOptions
from kvstore.block import content_hashes, event_hash, routing_hashes, routing_seed
from kvstore.events import BlocksRemoved, BlocksStored, TierCleared
from kvstore.page import Tier
from radix_index.base import Knowledge
from tests.gateways import Client, gateway_for
from tests.scripted_engine import Json, ScriptedEngine

BLOCK = 16
PROMPT = list(range(100, 100 + 10 * BLOCK + 3))


class Engine:
    """A scripted engine with a real event publisher."""

    def __init__(self, engine: ScriptedEngine, pool: str | None) -> None:
        self.engine, self.publisher, self._pool = engine, EventPublisher(), pool
        self.tell()

    def tell(self) -> None:
        """Say in ``/server_info`` where events are."""
        events: Json = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.publisher.port,
            "replay_endpoint_port_base": self.publisher.replay_port,
            "topic": self.publisher.topic,
            "block_size": BLOCK,
            "dp_size": 1,
        }
        self.engine.info = {"kv_events": events, "keepwarm": {"pool_id": self._pool}}

    def holds(self, tokens: Sequence[int], tier: Tier = Tier.DEVICE, salt: str | None = None) -> tuple[int, ...]:
        """Publish that these tokens' blocks are stored; returns the engine's names of them."""
        names = tuple(event_hash(digest) for digest in content_hashes(tokens, BLOCK, salt=salt))
        whole = tuple(tokens[: len(names) * BLOCK])
        self.publisher.publish([BlocksStored(names, None, whole, BLOCK, tier, salt=salt)])
        return names

    def lives_anew(self) -> None:
        """Be another process: other sockets, nothing held."""
        self.publisher.close()
        self.publisher = EventPublisher()
        self.tell()


@asynccontextmanager
async def _fleet(home: Path, *, pool: str | None = None) -> AsyncIterator[tuple[Client, Engine, Engine]]:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        a, b = Engine(first, pool), Engine(second, pool)
        try:
            models = [{"name": "m", "tokenizer": "none"}]
            async with gateway_for([first, second], home, models=models) as client:
                await client.until(lambda: all(_knowledge(client, i) is Knowledge.COMPLETE for i in ("e0", "e1")))
                yield client, a, b
        finally:
            a.publisher.close()
            b.publisher.close()


def _knowledge(client: Client, instance: str) -> Knowledge | None:
    return client.gateway.fleet.instances[instance].knowledge


def _blocks(client: Client) -> int:
    """Return the longest run of the prompt's blocks that the index knows anywhere."""
    hashes = routing_hashes(PROMPT, BLOCK, routing_seed("m"))
    return max((match.blocks for match in client.gateway.index.match(hashes).values()), default=0)


async def _routed(client: Client, tokens: Sequence[int], **more: str) -> tuple[str, int, tuple[int, ...], bool]:
    """Send the prompt; return the instance, the predicted hits, those by tier, and whether they were exact."""
    body = {"model": "m", "prompt": list(tokens), **more}
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        assert response.status == 200
        record = await client.record(response.headers["x-keepwarm-request-id"])
    decision = record.decision
    assert decision is not None
    assert record.gateway_prompt_tokens == len(tokens)
    tiers = next(c.hit_tokens for c in decision.candidates if c.instance == decision.instance)
    return decision.instance, decision.predicted_hit_tokens, tiers, decision.exact


async def test_requests_go_where_their_prefix_is(tmp_path: Path) -> None:
    async with _fleet(tmp_path) as (client, a, b):
        a.holds(PROMPT[: 4 * BLOCK])
        b.holds(PROMPT)
        await client.until(lambda: _blocks(client) == 10)
        for _ in range(3):
            assert await _routed(client, PROMPT) == ("e1", 10 * BLOCK, (10 * BLOCK, 0, 0, 0), True)
        assert (await _routed(client, PROMPT, cache_salt="mine"))[1] == 0
        assert (await _routed(client, PROMPT[: 4 * BLOCK]))[1] == 3 * BLOCK  # the last token is always computed


async def test_the_index_follows_removals_and_flushes(tmp_path: Path) -> None:
    async with _fleet(tmp_path) as (client, a, _):
        names = a.holds(PROMPT)
        a.holds(PROMPT[: 2 * BLOCK], Tier.HOST)
        await client.until(lambda: _blocks(client) == 10)
        a.publisher.publish([BlocksRemoved(names[6:], Tier.DEVICE)])
        await client.until(lambda: _blocks(client) == 6)
        assert await _routed(client, PROMPT) == ("e0", 6 * BLOCK, (6 * BLOCK, 0, 0, 0), True)
        a.publisher.publish([BlocksRemoved(names[:6], Tier.DEVICE)])
        await client.until(lambda: _blocks(client) == 2)
        assert await _routed(client, PROMPT) == ("e0", 2 * BLOCK, (0, 2 * BLOCK, 0, 0), True)
        a.publisher.publish([TierCleared((Tier.DEVICE, Tier.HOST))])
        await client.until(lambda: _blocks(client) == 0)


async def test_a_pool_is_everybodys(tmp_path: Path) -> None:
    async with _fleet(tmp_path, pool="p") as (client, a, _):
        a.holds(PROMPT, Tier.POOL)
        await client.until(lambda: _blocks(client) == 10)
        async with client.session.post(f"{client.url}/keepwarm/v1/instances/e0/drain") as response:
            assert response.status == 200
        assert await _routed(client, PROMPT) == ("e1", 10 * BLOCK, (0, 0, 0, 10 * BLOCK), True)


@pytest.mark.parametrize("is_seen", [True, False], ids=["probe saw it gone", "back between two probes"])
async def test_a_restarted_engine_starts_with_nothing(tmp_path: Path, is_seen: bool) -> None:
    async with _fleet(tmp_path) as (client, a, _):
        a.holds(PROMPT)
        await client.until(lambda: _blocks(client) == 10)
        if is_seen:
            await a.engine.close()
            await client.until(lambda: _blocks(client) == 0)
            a.lives_anew()
            await a.engine.open()
        else:
            port, replay = a.publisher.port, a.publisher.replay_port
            a.publisher.close()
            a.publisher = EventPublisher(PublisherOptions(port=port, replay_port=replay))
        a.holds(PROMPT[: 3 * BLOCK])
        await client.until(lambda: _blocks(client) == 3 and _knowledge(client, "e0") is Knowledge.COMPLETE)
        assert (await _routed(client, PROMPT))[:2] == ("e0", 3 * BLOCK)
