"""R19: a tenant that probes for another's prompt learns nothing: no hit, route, run or answer, whatever it sends.

That pages are kept apart in every tier is held by the embedded engine's and the stores' own tests; here is what the
gateway adds: the salt is its own, and everything that it knows of prompts is known by salt.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.identity import Caller, effective_salt
from tests.gateways import Client, gateway_for
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer
from tracing.record import Identity

pytestmark = pytest.mark.requirement("R19")

SECRET_TASK = "the merger with Initech closes on the third of May, and nobody may know " * 40
PROMPT: list[Any] = [{"role": "user", "content": SECRET_TASK}]
A, B = {"x-api-key": "sk-a"}, {"x-api-key": "sk-b"}
KEYS = [
    {"id": "a", "secret": "sk-a", "tenant": "acme"},
    {"id": "a2", "secret": "sk-a2", "tenant": "acme"},
    {"id": "b", "secret": "sk-b", "tenant": "bolt"},
]
A_SALT = effective_salt(Caller(Identity("acme", "default", "a"), is_salted=True), None)


def replying(asked: Asked) -> Script:
    return Script(body=answer("understood", prompt=700, output=2))


async def asks(client: Client, who: dict[str, str], **body: Any) -> tuple[int, dict[str, str], Any]:
    async with client.chat(who, **{"messages": PROMPT, "max_tokens": 4, **body}) as response:
        return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.json()


async def test_a_hostile_tenant_learns_nothing(tmp_path: Path) -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        engines = [first, second]
        for engine in engines:
            engine.script_for = replying
        instances = [
            {"id": f"e{n}", "url": engine.url, "adapter": "sglang", "models": ["m"], "capacity_tokens": 100_000}
            for n, engine in enumerate(engines)
        ]
        async with gateway_for(
            engines, tmp_path, keys=KEYS, instances=instances, models=[{"name": "m", "tokenizer": "default"}],
            ready_limit_s=60,
        ) as client:  # fmt: skip
            for _ in range(3):
                status, told, body = await asks(client, A)
                assert status == 200
            warm, run = told["x-keepwarm-instance"], told["x-keepwarm-run"]
            assert int(told["x-keepwarm-predicted-hit"]) > 400  # its own tenant finds it …
            assert (await asks(client, {"x-api-key": "sk-a2", "x-keepwarm-min-hit": "80%"}))[0] == 200

            salts = {json.loads(asked.body)["cache_salt"] for engine in engines for asked in engine.asked}
            assert salts == {A_SALT}
            wishes: list[dict[str, Any]] = [
                {}, {"cache_salt": A_SALT}, {"cache_salt": "acme"}, {"cache_salt": ""}, {"user": "acme"},
                {"metadata": {"tenant": "acme"}}, {"extra_body": {"cache_salt": A_SALT}}, {"cache_salt": None},
            ]  # fmt: skip
            for number, wish in enumerate(wishes):  # … and this one never does
                probe = {**B, "x-keepwarm-min-hit": "1"}
                status, told, body = await asks(client, probe, **wish)
                assert (status, body["error"]["code"]) == (412, "prefix_cold"), wish
                assert body["error"]["message"].startswith("0 tokens")
                assert "x-keepwarm-predicted-hit" not in told
                unlike = [{"role": "user", "content": f"{number} {SECRET_TASK}"}]
                status, told, _ = await asks(client, B, messages=unlike, **wish)
                assert (status, told["x-keepwarm-predicted-hit"]) == (200, "0")
                asked = max((e.asked[-1] for e in engines if e.asked), key=lambda one: one.json["messages"] == unlike)
                assert asked.json.get("cache_salt") not in (A_SALT, "acme", "", None)

            # a request that is cut off under way leaves nothing behind that tells of anybody
            held = asyncio.Event()
            for engine in engines:
                engine.script_for = lambda asked: Script(body=answer("x"), wait_for=held)
            cut = [asyncio.create_task(asks(client, who)) for who in (A, B, A, B)]
            await client.until(lambda: client.gateway.flights.count == 4)
            for task in cut:
                task.cancel()
            await asyncio.wait(cut)
            held.set()
            await client.until(client.at_rest)
            for engine in engines:
                engine.script_for = replying

            # other ways to what belongs to A
            assert (await asks(client, {**B, "x-keepwarm-run": run}))[0] == 200
            of_a = {record.request_id for record in client.stored() if record.identity.tenant == "acme"}
            assert len(of_a) >= 4
            for path in (f"/keepwarm/v1/runs/{run}", f"/console/runs/{run}", f"/keepwarm/v1/runs/{run}?tenant=acme"):
                async with client.session.get(client.url + path, headers=B) as response:
                    text = (await response.text()).replace(run, "")  # it may have a run of that name, of its own
                assert "Initech" not in text
                assert not [told for told in of_a if told in text], path
            async with client.session.get(f"{client.url}/keepwarm/v1/runs/{run}", headers=A) as response:
                assert all(r["identity"]["tenant"] == "acme" for r in (await response.json())["records"])
            async with client.session.post(
                f"{client.url}/v1/responses", headers=A, json={"model": "m", "input": SECRET_TASK}
            ) as response:
                kept = (await response.json())["id"]
            for method, path in (
                ("GET", f"/v1/responses/{kept}"), ("GET", f"/v1/responses/{kept}/input_items"),
                ("DELETE", f"/v1/responses/{kept}"), ("POST", f"/v1/responses/{kept}/cancel"),
            ):  # fmt: skip
                async with client.session.request(method, client.url + path, headers=B) as response:
                    assert response.status == 404
            body = {"model": "m", "input": "and then?", "previous_response_id": kept}
            async with client.session.post(f"{client.url}/v1/responses", headers=B, json=body) as response:
                assert response.status in (400, 404)
            async with client.session.get(f"{client.url}/v1/responses/{kept}", headers=A) as response:
                assert response.status == 200
            status, told, _ = await asks(client, {**A, "x-keepwarm-min-hit": "80%"})
            assert (status, told["x-keepwarm-instance"]) == (200, warm)  # and A's own prefix is where it was
