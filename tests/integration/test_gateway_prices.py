"""How the gateway prices what it serves: by several books, by region, by the tier that an answer names; and marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, stream
from tracing.record import HitSource

OWN = """
name = "own"
currency = "EUR"
[[price]]
models = ["m"]
regions = ["north"]
rates = { fresh = 5, hit = 1, output = 7 }
[[price]]
models = ["m"]
rates = { fresh = 3, hit = 1, output = 7 }
[price.service_tiers]
batch = { multiplier = 0.5 }
"""
VENDOR = (
    'name = "vendor"\ncurrency = "USD"\n[[price]]\nmodels = ["v-*"]\nrates = { fresh = 1, hit = 0.1, output = 2 }\n'
)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_tier_that_an_answer_names(tmp_path: Path, streamed: bool) -> None:
    prices = tmp_path / "own.toml"
    prices.write_text(OWN)
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, billing={"prices": str(prices)}) as client:
        for tier in ("default", "batch", "scale"):
            more = {"service_tier": tier}
            engine.script = (
                Script(events=stream(["a", "b"], prompt=10, cached=4, **more))
                if streamed
                else Script(body=answer("ab", prompt=10, output=2, cached=4, **more))
            )
            async with client.chat(stream=streamed) as response:
                await response.read()
        standard, batch, unknown = [record.charge for record in await client.records(3)]
        assert (standard.currency, standard.amount_nano) == ("EUR", 6 * 3000 + 4 * 1000 + 2 * 7000)
        assert batch.amount_nano == (6 * 3000 + 4 * 1000 + 2 * 7000) // 2
        assert (unknown.amount_nano, unknown.unpriced_reason) == (None, "no_service_tier")


async def test_the_book_of_a_model_and_the_region_of_an_instance(tmp_path: Path) -> None:
    for name, text in (("own", OWN), ("vendor", VENDOR)):
        (tmp_path / f"{name}.toml").write_text(text)
    billing = {
        "prices": str(tmp_path / "own.toml"),
        "books": [{"prices": str(tmp_path / "vendor.toml"), "models": ["v-*"]}],
    }
    async with ScriptedEngine(models=("m", "v-1")) as engine:
        instance = {"id": "e0", "url": engine.url, "region": "north"}
        async with gateway_for([], tmp_path, billing=billing, instances=[instance]) as client:
            await client.until(lambda: client.gateway.fleet.instances["e0"].takes_requests)
            engine.script = Script(body=answer("ab", prompt=10, output=2, cached=4))
            for model in ("m", "v-1"):
                async with client.chat(model=model) as response:
                    assert response.status == 200
            own, vendor = await client.records(2)
    assert (own.charge.currency, own.charge.amount_nano) == ("EUR", 6 * 5000 + 4 * 1000 + 2 * 7000)
    assert (vendor.charge.currency, vendor.charge.amount_nano) == ("USD", 6 * 1000 + 4 * 100 + 2 * 2000)
    assert own.usage.hit_source is HitSource.TOTAL


async def test_a_record_says_which_prefixes_its_prompt_had(tmp_path: Path) -> None:
    """Prompts of ids need no tokenizer; what the next one shares with it is read off the marks."""
    async with ScriptedEngine() as engine:
        instance = {"id": "e0", "url": engine.url, "adapter": "openai", "capacity_tokens": 100_000}
        async with gateway_for([], tmp_path, instances=[instance]) as client:
            await client.until(lambda: client.gateway.fleet.instances["e0"].takes_requests)
            engine.script = Script(body=answer("ab", prompt=1000, output=2))
            for ids in (list(range(1000)), [*range(700), 7, *range(701, 1000)]):
                body = {"model": "m", "prompt": ids}
                async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
                    assert response.status == 200
            first, second = await client.records(2)
    assert first.prefix is not None
    assert second.prefix is not None
    stride = first.prefix.stride_tokens
    assert len(first.prefix.marks()) == 1000 // stride
    shared = sum(a == b for a, b in zip(first.prefix.marks(), second.prefix.marks(), strict=True))
    assert shared == 700 // stride


MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
           "stop_sequence": None, "content": [{"type": "text", "text": "x"}]}  # fmt: skip
SEARCHED = {"input_tokens": 10, "output_tokens": 2, "server_tool_use": {"web_search_requests": 3}}
MESSAGE_EVENTS = [
    {"type": "message_start", "message": MESSAGE | {"content": [], "usage": {"input_tokens": 10, "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": SEARCHED},
    {"type": "message_stop"},
]
CALL = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
RESPONSE = {"id": "resp_1", "object": "response", "model": "m", "status": "completed", "output": [CALL, CALL, CALL],
            "usage": {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}}  # fmt: skip


def events(listed: list[dict[str, Any]]) -> list[bytes]:
    return [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in listed]


@pytest.mark.parametrize(
    ("path", "more", "script"),
    [
        ("messages", {}, Script(body=MESSAGE | {"usage": SEARCHED})),
        ("messages", {"stream": True}, Script(events=events(MESSAGE_EVENTS))),
        ("responses", {}, Script(body=RESPONSE)),
        ("responses", {"stream": True}, Script(events=events([{"type": "response.completed", "response": RESPONSE}]))),
    ],
)
async def test_searches_that_an_api_ran_are_charged(
    path: str, more: dict[str, Any], script: Script, tmp_path: Path
) -> None:
    prices = tmp_path / "own.toml"
    prices.write_text(VENDOR.replace("v-*", "m") + "tool_fees = { web_search = 0.01 }\n")
    async with ScriptedEngine() as engine:
        instance = {"id": "e0", "url": engine.url, "adapter": "openai", "speaks": ["chat", "messages", "responses"]}
        async with gateway_for([engine], tmp_path, billing={"prices": str(prices)}, instances=[instance]) as client:
            engine.script = script
            said = (
                {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
                if path == "messages"
                else {"input": "x"}
            )
            async with client.session.post(f"{client.url}/v1/{path}", json={"model": "m", **said, **more}) as response:
                assert response.status == 200
                await response.read()
            (record,) = await client.records(1)
    assert record.usage.tool_uses == (("web_search", 3),)
    assert record.charge.amount_nano == 10 * 1000 + 2 * 2000 + 3 * 10_000_000
