"""What every engine that merely speaks OpenAI's API gets and gives, by its name, in front of a whole gateway.

None of these engines runs here. Each stands as a scripted server with the routes and the gauges that its published code
has, and nothing else: what an adapter asks for beyond that would be seen. ``openai`` stands for a vendor with a key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer, chunk, event, stream
from tracing.record import Outcome, UsageSource

KEY = "the-engine-s-own-key"
NOT_OPENAIS = {"cache_salt", "input_ids", "return_cached_tokens_details", "priority", "session_id", "rid",
               "continue_final_message", "add_generation_prompt", "return_token_ids"}  # fmt: skip


@dataclass(frozen=True)
class Wire:
    """An engine as its own code has it: where it says that it lives, how busy it is, what it lacks."""

    health: str
    load_path: str = ""
    load_page: str = ""
    load: tuple[int, int, float | None] = (0, 0, None)
    lacks: tuple[str, ...] = ()


WIRES = {
    "openai": Wire("/v1/models"),
    "tensorrt-llm": Wire(
        "/health",
        "/prometheus/metrics",
        'trtllm_num_requests_running{model_name="m",engine_type="undefined"} 3.0\n'
        'trtllm_num_requests_waiting{model_name="m",engine_type="undefined"} 2.0\n',
        (3, 2, None),
    ),
    "lmdeploy": Wire(
        "/health",
        "/metrics",
        'lmdeploy:num_requests_running{engine="0",model_name="m"} 4.0\n'
        'lmdeploy:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        'lmdeploy:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25\n',
        (4, 1, 0.25),
    ),
    "tgi": Wire("/health", "/metrics", "tgi_batch_current_size 5\ntgi_queue_size 7\n", (5, 7, None)),
    "ollama": Wire("/v1/models"),
    "mlc-llm": Wire("/v1/models"),
    "rtp-llm": Wire("/v1/models", lacks=("completions",)),
    "deepinfer": Wire("/v1/models"),
    "xllm": Wire("/v1/models"),
}


@asynccontextmanager
async def behind(name: str, home: Path, **settings: Any) -> AsyncIterator[tuple[ScriptedEngine, Client]]:
    """Run such an engine, and a gateway in front of it with a key for it."""
    wire = WIRES[name]
    async with ScriptedEngine() as engine:
        if wire.load_path:
            engine.pages[wire.load_path] = wire.load_page.encode()
        entry = {"id": "e0", "url": engine.url, "adapter": name, "api_key": KEY, **settings.pop("entry", {})}
        async with gateway_for([engine], home, instances=[entry], **settings) as client:
            yield engine, client


def _script(asked: Asked) -> Script:
    """Answer in OpenAI's own shape, usage in a stream only where it was asked for."""
    sent = asked.json
    if not sent.get("stream"):
        return Script(body=answer("well", prompt=12, output=3, cached=8))
    told = stream(["w", "ell"], prompt=12, cached=8)
    return Script(events=told if (sent.get("stream_options") or {}).get("include_usage") else [*told[:-2], told[-1]])


@pytest.mark.parametrize("name", WIRES)
async def test_each_is_asked_for_what_openai_s_api_has_and_nothing_more(name: str, tmp_path: Path) -> None:
    async with behind(name, tmp_path) as (engine, client):
        engine.script_for = _script
        count = 0
        for streams in (False, True):
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "top_k": 4}),
                ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
                ("/v1/responses", {"input": "hi"}),
            ):
                body = {"model": "m", "stream": streams, **body}
                async with client.session.post(
                    f"{client.url}{path}", json=body, headers={"authorization": "Bearer the-client-s"}
                ) as response:
                    shown = await response.read()
                    assert response.status == 200, shown
                    assert b"ell" in shown
                    count += 1
        for asked in engine.asked:
            assert asked.path == "/v1/chat/completions"
            assert asked.headers["authorization"] == f"Bearer {KEY}"
            assert not NOT_OPENAIS & asked.json.keys()
        assert engine.asked[0].json["top_k"] == 4, "what the client wrote goes through"
        for record in await client.records(count):
            assert record.outcome is Outcome.OK
            assert record.usage.source is UsageSource.ENGINE
            assert (record.usage.prompt_tokens, record.usage.hit_unknown_tokens) == (12, 8)


@pytest.mark.parametrize("name", WIRES)
async def test_each_tells_its_load_where_it_has_gauges_and_is_not_asked_where_not(name: str, tmp_path: Path) -> None:
    wire = WIRES[name]
    async with behind(name, tmp_path) as (engine, client):
        instance = client.gateway.fleet.instances["e0"]
        assert instance.spec.adapter.health_path == wire.health
        if wire.load_path:
            await client.until(lambda: instance.told_load.load is not None)
            told = instance.told_load.load
            assert told is not None
            assert (told.running, told.waiting, told.used_share) == wire.load
        assert {asked.path for asked in engine.looked_up} == ({wire.load_path} if wire.load_path else set())
        assert all(asked.headers["authorization"] == f"Bearer {KEY}" for asked in engine.looked_up)


@pytest.mark.parametrize("name", [name for name in WIRES if WIRES[name].lacks])
async def test_what_an_engine_lacks_is_refused_by_name(name: str, tmp_path: Path) -> None:
    async with behind(name, tmp_path) as (engine, client):
        async with client.session.post(f"{client.url}/v1/completions", json={"model": "m", "prompt": "hi"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "endpoint_not_supported"
        assert engine.asked == []


@pytest.mark.parametrize("name", WIRES)
async def test_a_broken_stream_of_theirs_ends_honestly(name: str, tmp_path: Path) -> None:
    """They promise no way to go on with an answer that another one began, so nobody does."""
    async with ScriptedEngine() as other, ScriptedEngine() as engine:
        engine.script_for = other.script_for = lambda asked: Script(events=stream(["half "])[:2], end="reset")
        entries = [{"id": f"e{n}", "url": e.url, "adapter": name} for n, e in enumerate((engine, other))]
        async with gateway_for([engine, other], tmp_path, instances=entries) as client:
            async with client.chat(stream=True) as response:
                shown = await response.read()
            assert b"half" in shown
            assert b'"error"' in shown
            assert b'finish_reason": "stop' not in shown
            (record,) = await client.records(1)
            assert (record.outcome, len(record.attempts)) == (Outcome.TRUNCATED, 1)
            assert len(engine.asked) + len(other.asked) == 1


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_vendor_gets_what_failed_inside_only_where_its_entry_says_so(allowed: bool, tmp_path: Path) -> None:
    async with ScriptedEngine() as own, ScriptedEngine() as vendor:
        entries = [
            {"id": "own", "url": own.url, "adapter": "vllm", "models": ["m"]},
            {"id": "vendor", "url": vendor.url, "adapter": "openai", "api_key": KEY, "models": ["m"],
             "network": "outside", "takes_over": allowed},
        ]  # fmt: skip
        routing = {"policy": "round-robin"}
        async with gateway_for([own, vendor], tmp_path, instances=entries, routing=routing) as client:
            busy = Script(status=503, body={"error": {"message": "later"}})
            own.script_for = lambda asked: busy
            async with client.chat() as response:
                assert response.status == (200 if allowed else 503)
            first = Script(events=[event(chunk({"role": "assistant", "content": "half "}))], end="reset")
            own.script_for = lambda asked: first
            for _ in range(4):
                async with client.chat(stream=True, max_tokens=9) as response:
                    await response.read()
            await own.close()
            async with client.chat() as response:
                assert response.status == (200 if allowed else 502)
            assert bool(vendor.asked) is allowed
            assert all(json.loads(asked.body)["model"] == "m" for asked in vendor.asked)
            if allowed:
                assert {asked.headers["authorization"] for asked in vendor.asked} == {f"Bearer {KEY}"}
