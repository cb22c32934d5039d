"""Wrong values in every place of every endpoint's body: an answer or a refusal by name, never a fault of the gateway's.

``HOSTILE_STEP=1`` puts every value in every place (minutes); by default each place gets a few of them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.gateways import Client, gateway_for
from tests.openapi_target import KEY, script_for
from tests.samples.rich_bodies import ADMIN_BODIES, HOSTILE, RAW, RICH_BODIES, Place, places, put
from tests.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

STEP = int(os.environ.get("HOSTILE_STEP", "9"))
MARK = "\x01here"
HEADERS = {"authorization": f"Bearer {KEY['secret']}", "content-type": "application/json"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    models = [{"name": "m", "tokenizer": "default", "usage_counts": "ignored"}]
    async with ScriptedEngine() as engine:
        engine.script_for = script_for
        home = tmp_path_factory.mktemp("home")
        async with gateway_for([engine], home, models=models, keys=[KEY]) as client:
            yield client
            assert client.at_rest()


def bodies(body: dict[str, Any], seed: int) -> Iterator[tuple[Place, bytes]]:
    number = seed
    for at in places(body):
        marked = json.dumps(put(body, at, MARK)).encode()
        for value in HOSTILE:
            number += 1
            if number % STEP == 0:
                yield at, json.dumps(put(body, at, value)).encode()
        for raw in RAW if len(at) <= 2 else ():
            number += 1
            if number % STEP == 0:
                yield at, marked.replace(json.dumps(MARK).encode(), raw)


def is_shaped(path: str, told: Any) -> bool:
    if "/messages" in path:
        return told["type"] == "error" and set(told["error"]) == {"type", "message"}
    return set(told["error"]) == {"message", "type", "param", "code"}


async def sweep(
    client: Client, method: str, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture, seed: int = 0
) -> int:
    count = 0
    with caplog.at_level(logging.WARNING):
        for at, sent in bodies(body, seed):
            count += 1
            url = f"{client.url}{path}"
            async with client.session.request(method, url, data=sent, headers=HEADERS) as response:
                told = await response.read()
                where = f"{path} {at} {sent[:200]!r}: {response.status} {told[:300]!r}"
                assert response.status < 500, where
                assert response.status < 400 or is_shaped(path, json.loads(told)), where
    assert not [record.getMessage() for record in caplog.records if record.exc_info], path
    return count


@pytest.mark.parametrize("path", RICH_BODIES)
async def test_r07_what_agents_send(gateway: Client, caplog: pytest.LogCaptureFixture, path: str) -> None:
    assert await sweep(gateway, "post", path, {"model": "m", **RICH_BODIES[path]}, caplog) > 20


@pytest.mark.parametrize("endpoint", ["chat", "messages", "responses"])
async def test_r07_what_is_asked_to_be_explained(
    gateway: Client, caplog: pytest.LogCaptureFixture, endpoint: str
) -> None:
    path = {"chat": "/v1/chat/completions"}.get(endpoint, f"/v1/{endpoint}")
    body = {"model": "m", **RICH_BODIES[path]}
    async with gateway.session.post(f"{gateway.url}{path}", json=body, headers=HEADERS) as response:
        assert response.status == 200  # there is something to hold it against
    assert await sweep(gateway, "post", f"/keepwarm/v1/explain?endpoint={endpoint}", body, caplog, seed=4) > 20


async def test_r07_what_operators_send(gateway: Client, caplog: pytest.LogCaptureFixture) -> None:
    for (method, path), body in ADMIN_BODIES.items():
        async with gateway.session.request(method, f"{gateway.url}{path}", json=body, headers=HEADERS) as response:
            assert response.status < 300, await response.text()
        assert await sweep(gateway, method, path, body, caplog) > 3
