"""A pool that is full of a prompt's pages and that an engine does not read: what the gateway expects of it."""

from __future__ import annotations

from pathlib import Path

from kvstore.block import routing_hashes, routing_seed
from kvstore.page import Tier
from radix_index.base import Knowledge
from tests.gateways import Client, gateway_for
from tests.publishing_engine import BLOCK, PublishingEngine
from tests.scripted_engine import Script, ScriptedEngine, answer

PROMPT = list(range(100, 100 + 10 * BLOCK + 3))
HELD = 10 * BLOCK


async def _expected(client: Client) -> int:
    """Ask; return the hits that were predicted."""
    async with client.session.post(f"{client.url}/v1/completions", json={"model": "m", "prompt": PROMPT}) as response:
        assert response.status == 200
        record = await client.record(response.headers["x-keepwarm-request-id"])
    assert record.decision is not None
    return record.decision.predicted_hit_tokens


async def test_nothing_is_expected_of_a_tier_that_is_not_read_until_it_is_read_again(tmp_path: Path) -> None:
    async with ScriptedEngine() as scripted:
        engine = PublishingEngine(scripted, "p")
        try:
            async with gateway_for([scripted], tmp_path, models=[{"name": "m", "tokenizer": "none"}]) as client:
                instance = client.gateway.fleet.instances["e0"]
                await client.until(lambda: instance.knowledge is Knowledge.COMPLETE)
                engine.holds(PROMPT, Tier.POOL)
                hashes = routing_hashes(PROMPT, BLOCK, routing_seed("m"))
                await client.until(lambda: client.gateway.index.match(hashes)["e0"].blocks == 10)
                scripted.script = Script(body=answer("computed", prompt=len(PROMPT), cached=0))
                assert await _expected(client) == HELD
                while await _expected(client):
                    assert len(scripted.asked) < 20
                async with client.session.get(f"{client.url}/keepwarm/v1/instances") as response:
                    (told,) = (await response.json())["instances"]
                assert told["tiers_not_read"] == ["pool"]
                scripted.script = Script(body=answer("fetched", prompt=len(PROMPT), cached=HELD))
                while not await _expected(client):
                    assert len(scripted.asked) < 40
                assert not instance.tier_use.refuses
        finally:
            engine.publisher.close()
