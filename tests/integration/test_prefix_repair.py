"""A key that wants its prefixes repaired: what the engine gets, what the trace says, and what others' requests stay."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer

pytestmark = pytest.mark.model

RULES = "\n".join(f"Rule {number}: keep the house style and never guess what a tool can tell." for number in range(40))
REPAIRED, PLAIN = {"authorization": "Bearer sk-repaired-1"}, {"authorization": "Bearer sk-plain-1"}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(info={"version": "0.5.23"}) as engine:
        engine.script_for = lambda asked: Script(body=answer("ok"))
        yield engine


@pytest.fixture
async def client(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Client]:
    keys = [
        {"id": "repaired", "secret": "sk-repaired-1", "repairs": ["sort-tools", "move-volatile-lines"]},
        {"id": "plain", "secret": "sk-plain-1"},
    ]
    models = [{"name": "m", "tokenizer": "default", "usage_counts": "ignored"}]
    async with gateway_for([engine], tmp_path, models=models, keys=keys) as client:
        yield client
        assert client.at_rest()


async def ask(client: Client, day: int, headers: dict[str, str], tools: list[dict[str, Any]]) -> str:
    system = f"You are an agent.\nToday is 2026-11-{day:02}.\n{RULES}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "go"}]
    async with client.chat(headers, messages=messages, tools=tools, temperature=0.50) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-keepwarm-request-id"]


async def test_a_repaired_prefix_outlives_the_day_and_the_order_of_tools(
    client: Client, engine: ScriptedEngine
) -> None:
    names = ["b", "a", "c"]
    for day in range(1, 4):
        names = [*names[1:], names[0]]
        request_id = await ask(client, day, REPAIRED, [tool(name) for name in names])
        got = json.loads(engine.asked[-1].body)
        assert [each["function"]["name"] for each in got["tools"]] == ["a", "b", "c"]
        lines = got["messages"][0]["content"].split("\n")
        assert lines[0] == "You are an agent."
        assert lines[-1] == f"Today is 2026-11-{day:02}."
        assert got["messages"][1] == {"role": "user", "content": "go"}
        note = (await client.record(request_id)).prompt
        assert note is not None
        assert set(note.repairs) == ({"sort-tools", "move-volatile-lines"} if day != 2 else set(note.repairs))
        assert "move-volatile-lines" in note.repairs
    metrics = client.gateway.metrics.render().decode()
    assert 'keepwarm_prefix_repairs_total{model="m",policy="move-volatile-lines"} 3.0' in metrics


async def test_who_does_not_want_it_is_served_as_before(client: Client, engine: ScriptedEngine) -> None:
    request_id = await ask(client, 7, PLAIN, [tool("b"), tool("a")])
    got = json.loads(engine.asked[-1].body)
    assert [each["function"]["name"] for each in got["tools"]] == ["b", "a"]
    assert got["messages"][0]["content"].split("\n")[1] == "Today is 2026-11-07."
    note = (await client.record(request_id)).prompt
    assert note is None or note.repairs == ()


async def test_a_request_that_needs_no_repair_is_sent_byte_for_byte(client: Client, engine: ScriptedEngine) -> None:
    body = b'{ "messages": [{"role": "user","content": "Today is 2026-11-07 \\u00e9"}], "model":"m", "tools":[] }'
    async with client.session.post(f"{client.url}/v1/chat/completions", data=body, headers=REPAIRED) as response:
        assert response.status == 200
    assert engine.asked[-1].body.startswith(body[:-2])  # behind it stand the members that SGLang is given


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        ("responses", [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}]),
        ("messages", [{"name": "f", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"}]),
    ],
)
async def test_tools_that_no_engine_here_can_be_given_are_taken_out_for_keys_that_want_it(
    engine: ScriptedEngine, tmp_path: Path, path: str, tools: list[dict[str, Any]]
) -> None:
    keys = [
        {"id": "lenient", "secret": "sk-lenient-1", "repairs": ["drop-vendor-tools"]},
        {"id": "p", "secret": "sk-strict-1"},
    ]
    said = (
        {"input": "go"} if path == "responses" else {"messages": [{"role": "user", "content": "go"}], "max_tokens": 9}
    )
    models = [{"name": "m", "tokenizer": "default", "usage_counts": "ignored"}]
    async with gateway_for([engine], tmp_path, models=models, keys=keys) as client:
        url, body = f"{client.url}/v1/{path}", {"model": "m", "tools": tools, **said}
        async with client.session.post(url, json=body, headers={"x-api-key": "sk-strict-1"}) as response:
            assert response.status == 400
        assert engine.asked == []
        async with client.session.post(url, json=body, headers={"x-api-key": "sk-lenient-1"}) as response:
            assert response.status == 200, await response.text()
            request_id = response.headers["x-keepwarm-request-id"]
        note = (await client.record(request_id)).prompt
    assert [tool["function"]["name"] for tool in engine.asked[0].json["tools"]] == ["f"]
    assert note is not None
    assert note.repairs == ("drop-vendor-tools",)
