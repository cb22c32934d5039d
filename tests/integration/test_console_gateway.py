"""The console of a real gateway: who may see what, a run while it streams, keys that count at once, an end in time."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import aiohttp

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, stream

KEYS = [
    {"id": "ka", "secret": "sk-a", "tenant": "acme", "roles": ["user"]},
    {"id": "kb", "secret": "sk-b", "tenant": "bolt"},
    {"id": "money", "secret": "sk-money", "tenant": "acme", "roles": ["finance"]},
    {"id": "root", "secret": "sk-root", "admin": True},
]


async def page(client: Client, address: str, key: str, status: int = 200) -> str:
    async with client.session.get(f"{client.url}{address}", headers={"x-api-key": key}) as response:
        assert response.status == status, (address, key, response.status)
        return await response.text()


async def told(response: aiohttp.ClientResponse) -> dict[str, dict[str, str]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("the stream ended")


async def test_roles_see_their_pages_and_tenants_their_runs(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=KEYS) as client:
        engine.script = Script(body=answer("hello"))
        async with client.chat({"x-api-key": "sk-a", "x-keepwarm-run": "secret-run"}) as response:
            assert response.status == 200
        await client.records(1)
        assert "secret-run" in await page(client, "/console/runs", "sk-a")
        assert "secret-run" not in await page(client, "/console/runs", "sk-b")
        await page(client, "/console/runs/secret-run", "sk-b", 404)
        await page(client, "/console/runs", "sk-money", 403)
        assert "Requests" in await page(client, "/console/cost", "sk-money")
        await page(client, "/console/cost", "sk-a", 403)
        for address in ("instances", "stores", "index", "settings", "keys"):
            await page(client, f"/console/{address}", "sk-a", 403)
            assert "sk-" not in await page(client, f"/console/{address}", "sk-root")
        assert "e0" in await page(client, "/console/index", "sk-root")
        await page(client, "/console/live", "nobody", 401)


async def test_a_run_shows_while_it_streams_and_its_step_when_it_ends(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=KEYS) as client:
        engine.script = Script(events=stream(["Hel", "lo"]), pause=lambda number: gate if number == 2 else None)
        headers = {"x-api-key": "sk-a", "x-keepwarm-run": "now", "x-keepwarm-step-name": "<i>think"}
        live = f"{client.url}/console/live?view=run&run=now"
        async with asyncio.timeout(30), client.chat(headers, stream=True) as chat:
            assert (await chat.content.readline()).startswith(b"data:")
            async with client.session.get(live, headers={"x-api-key": "sk-a"}) as mine:
                first = await told(mine)
                assert "&lt;i&gt;think" in first["replaced"]["flights"]
                assert first["added"] == {}
                assert re.search(r"In flight</dt><dd>1<", await page(client, "/console", "sk-a"))
                assert re.search(r"In flight</dt><dd>0<", await page(client, "/console", "sk-b"))
                gate.set()
                await chat.read()
                while not (event := await told(mine))["added"]:
                    pass
                assert "&lt;i&gt;think" in event["added"]["step-1"]


async def test_a_key_made_in_the_console_works_at_once_and_ends_at_once(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=KEYS) as client:
        engine.script = Script(body=answer("hello"))
        listed = await page(client, "/console/keys", "sk-root")
        word = listed.split('name="word" value="')[1].split('"')[0]
        form = {"word": word, "id": "made", "role": "user"}
        post = client.session.post
        async with post(f"{client.url}/console/keys", data=form, headers={"x-api-key": "sk-a"}) as refused:
            assert refused.status == 403
        async with post(f"{client.url}/console/keys", data=form, headers={"x-api-key": "sk-root"}) as made:
            secret = (await made.text()).split('<pre tabindex="0">')[1].split("<")[0]
        async with client.chat({"x-api-key": secret}) as response:
            assert response.status == 200
        revoke = f"{client.url}/console/keys/made/revoke"
        async with post(revoke, data={"word": word}, headers={"x-api-key": "sk-root"}) as revoked:
            assert revoked.status == 200
        async with client.chat({"x-api-key": secret}) as response:
            assert response.status == 401
        await client.records(1)


async def test_a_gateway_that_goes_down_ends_its_live_pages(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        async with ScriptedEngine() as engine, gateway_for([engine], tmp_path) as client:
            live = await session.get(f"{client.url}/console/live?window=15m")
            assert "figures" in (await told(live))["replaced"]
        await live.content.read()
        live.release()
