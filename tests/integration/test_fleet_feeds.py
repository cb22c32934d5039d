"""Routing follows the engines' real event sockets: what they hold, what they lose, and when they are gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine_adapter.wire_client import WireClient
from gateway.commands.check import _instance as check_instance
from gateway.settings import InstanceSettings
from kvstore.block import content_hashes, event_hash, routing_hashes, routing_seed
from kvstore.events import BlocksRemoved, BlocksStored, TierCleared
from kvstore.page import Tier
from radix_index.base import Knowledge
from tests.gateways import Client, gateway_for
from tests.publishing_engine import BLOCK, PublishingEngine
from tests.scripted_engine import ScriptedEngine

PROMPT = list(range(100, 100 + 10 * BLOCK + 3))


@asynccontextmanager
async def _fleet(
    home: Path, *, pool: str | None = None
) -> AsyncIterator[tuple[Client, PublishingEngine, PublishingEngine]]:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        a, b = PublishingEngine(first, pool), PublishingEngine(second, pool)
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


async def _routed(
    client: Client, tokens: Sequence[int], model: str = "m", **more: str
) -> tuple[str, int, tuple[int, ...], bool]:
    """Send the prompt; return the instance, the predicted hits, those by tier, and whether they were exact."""
    body = {"model": model, "prompt": list(tokens), **more}
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


async def test_every_name_of_a_model_finds_its_cache_and_every_adapter_its_own(tmp_path: Path) -> None:
    engine = ScriptedEngine(models=("m", "alias", "x", "y"))
    engine.parents = {"x": "m", "y": "m"}
    async with engine, ScriptedEngine(models=("m", "alias", "x", "y")) as other:
        other.parents = engine.parents
        a, b = PublishingEngine(engine), PublishingEngine(other)
        models = [{"name": name, "tokenizer": "none"} for name in engine.models]
        async with gateway_for([engine, other], tmp_path, models=models) as client:
            await client.until(lambda: all(_knowledge(client, i) is Knowledge.COMPLETE for i in ("e0", "e1")))
            a.holds(PROMPT)
            b.holds(PROMPT[: 6 * BLOCK], adapter="x")
            await client.until(lambda: client.gateway.index.stats().blocks == 16)
            assert (await _routed(client, PROMPT, "m"))[:2] == ("e0", 10 * BLOCK)
            assert (await _routed(client, PROMPT, "alias"))[:2] == ("e0", 10 * BLOCK)
            assert (await _routed(client, PROMPT, "x"))[:2] == ("e1", 6 * BLOCK)
            assert (await _routed(client, PROMPT, "m", lora_path="x"))[:2] == ("e1", 6 * BLOCK)
            assert (await _routed(client, PROMPT, "y"))[1] == 0
            assert (await _routed(client, PROMPT, "m", extra_key="mine"))[1] == 0
        a.publisher.close()
        b.publisher.close()


async def test_what_engines_keep_apart_by_a_key_of_the_clients_is_told_apart_in_their_events(tmp_path: Path) -> None:
    """SGLang's events say nothing of ``extra_key``, so it goes into the salt, which they do tell."""
    async with _fleet(tmp_path) as (client, a, b):
        for extra in ("mine", "yours", ["a", "b"], None):
            body = {"model": "m", "prompt": PROMPT, "extra_key": extra}
            async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
                assert response.status == 200
        bodies = [asked.json for engine in (a, b) for asked in engine.engine.asked]
    salts = {str(body["extra_key"]): body.get("cache_salt") for body in bodies}
    assert salts["None"] is None
    assert len(set(salts.values())) == 4


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


async def test_faults_of_events_are_counted(tmp_path: Path) -> None:
    async with _fleet(tmp_path) as (client, a, _):
        parent, child = (content_hashes(PROMPT, BLOCK)[at] for at in (0, 1))
        orphan = BlocksStored((event_hash(child),), event_hash(parent), PROMPT[BLOCK : 2 * BLOCK], BLOCK, Tier.DEVICE)
        a.publisher.publish([orphan])
        a.publisher.forward(b"nonsense")
        await client.until(lambda: _knowledge(client, "e0") is Knowledge.PARTIAL)
        a.publisher.publish([orphan])
        feed = client.gateway.fleet.instances["e0"].feed
        await client.until(
            lambda: feed is not None and feed.waiting_blocks == 1 and feed.knowledge is Knowledge.PARTIAL
        )
        async with client.session.get(f"{client.url}/metrics") as response:
            page = await response.text()
    assert 'keepwarm_instance_events_waiting_blocks{instance="e0"} 1.0' in page
    assert 'keepwarm_instance_event_faults_total{instance="e0",kind="not understood"} 1.0' in page
    assert 'keepwarm_instance_event_faults_total{instance="e1",kind="not understood"} 0.0' in page
    assert 'keepwarm_instance_events_degraded{instance="e0"} 1.0' in page


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
        assert client.gateway.traces.lives() == {}
        if is_seen:
            await a.engine.close()
            await client.until(lambda: _blocks(client) == 0)
            a.lives_anew()
            await a.engine.open()
        else:
            a.restarts_in_place()
        a.holds(PROMPT[: 3 * BLOCK])
        await client.until(lambda: _blocks(client) == 3 and _knowledge(client, "e0") is Knowledge.COMPLETE)
        assert (await _routed(client, PROMPT))[:2] == ("e0", 3 * BLOCK)


async def test_the_check_says_what_small_pages_cost(tmp_path: Path) -> None:
    async with ScriptedEngine() as scripted, WireClient() as client:
        engine = PublishingEngine(scripted)
        try:
            settings = InstanceSettings(id="e", url=scripted.url)
            assert (await check_instance(settings, client)).endswith(f"tcp://127.0.0.1:{engine.publisher.port}")
            scripted.info["kv_events"]["block_size"] = 1
            assert "its pages hold 1 token, which costs here" in await check_instance(settings, client)
        finally:
            engine.publisher.close()
