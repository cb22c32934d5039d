"""Prompts computed by one engine and answered by another: what SGLang and vLLM are told, and whose counts count.

The engines are scripted: no separated engine runs on a CPU. What they are told follows SGLang 0.5.23's and vLLM 0.32's
sources.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, chunk, event, stream
from tracing.record import AttemptRole, Outcome

Json = dict[str, Any]
KEPT = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_block_ids": [[3, 4]],
        "remote_host": "10.0.0.1", "remote_port": 5600, "remote_request_id": "cmpl-1", "tp_size": 1}  # fmt: skip


@asynccontextmanager
async def separated(
    home: Path, kind: str, prefills: int = 1, decodes: int = 1, **settings: Any
) -> AsyncIterator[tuple[list[ScriptedEngine], list[ScriptedEngine], Client]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine()) for _ in range(prefills + decodes)]
        roles = ["prefill"] * prefills + ["decode"] * decodes
        instances = [
            {"id": f"{role[0]}{n}", "url": engine.url, "adapter": kind, "role": role, "models": ["m"],
             "bootstrap_port": 9100 + n}
            for n, (engine, role) in enumerate(zip(engines, roles, strict=True))
        ]  # fmt: skip
        client = await stack.enter_async_context(gateway_for(engines, home, instances=instances, **settings))
        yield engines[:prefills], engines[prefills:], client


def computed(cached: int = 8, **more: Any) -> Script:
    """Return the prefilling engine's answer: one token, and what it had of the prompt."""
    return Script(body=answer("x", prompt=10, output=1, cached=cached, **more))


@pytest.mark.parametrize("streams", [False, True])
async def test_sglang_gets_both_requests_at_once_with_one_room(streams: bool, tmp_path: Path) -> None:
    detail: Json = {"sglext": {"cached_tokens_details": {"device": 6, "host": 2}}}
    async with separated(tmp_path, "sglang") as ((prefill,), (decode,), client):
        met = asyncio.Event()
        prefill.script = Script(**{**computed(**detail).__dict__, "wait_for": met})
        whole = Script(events=stream(["well ", "done"]), wait_for=met) if streams else Script(body=answer("well done"))
        decode.script = Script(**{**whole.__dict__, "wait_for": met})
        asking = asyncio.create_task(
            _read(client, stream=streams, max_tokens=7, stream_options={"include_usage": True})
        )
        await asyncio.gather(prefill.until(lambda: bool(prefill.asked)), decode.until(lambda: bool(decode.asked)))
        met.set()  # neither answers before both are asked
        shown = await asking
        sent, told = prefill.asked[0].json, decode.asked[0].json
        room = {name: sent[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
        assert room == {name: told[name] for name in room}
        assert (room["bootstrap_host"], room["bootstrap_port"]) == ("127.0.0.1", 9100)
        assert 0 <= room["bootstrap_room"] < 2**63
        assert (sent["stream"], sent["max_tokens"], sent.get("stream_options")) == (False, 1, None)
        assert told["max_tokens"] == 7
        assert told["messages"] == sent["messages"]
        (record,) = await client.records(1)
        assert {(a.instance, a.role) for a in record.attempts} == {
            ("p0", AttemptRole.PREFILL),
            ("d1", AttemptRole.DECODE),
        }
        assert record.outcome is Outcome.OK
        assert (record.usage.prompt_tokens, record.usage.hit_device_tokens, record.usage.hit_host_tokens) == (10, 6, 2)
        assert record.usage.output_tokens == 2
        assert b"well" in shown
        if streams:
            counted = [json.loads(line[6:]) for line in shown.splitlines() if b'"usage"' in line and b"total" in line]
            assert counted[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
            assert "sglext" not in counted[-1]


@pytest.mark.parametrize("streams", [False, True])
async def test_vllm_is_asked_for_the_prompt_first_and_its_parameters_go_on(streams: bool, tmp_path: Path) -> None:
    async with separated(tmp_path, "vllm") as ((prefill,), (decode,), client):
        prefill.script = computed(kv_transfer_params=KEPT)
        decode.script = Script(events=stream(["well"])) if streams else Script(body=answer("well", output=1))
        shown = await _read(client, stream=streams, max_completion_tokens=7, min_tokens=3)
        sent, told = prefill.asked[0].json, decode.asked[0].json
        assert (sent["stream"], sent["max_tokens"], sent["max_completion_tokens"], sent["min_tokens"]) == (
            False,
            1,
            1,
            1,
        )
        assert sent["kv_transfer_params"]["do_remote_decode"] is True
        assert sent["kv_transfer_params"]["do_remote_prefill"] is False
        assert told["kv_transfer_params"] == KEPT
        assert (told["max_completion_tokens"], told["min_tokens"]) == (7, 3)
        assert "max_tokens" not in told
        (record,) = await client.records(1)
        assert [(a.instance, a.role) for a in record.attempts] == [
            ("p0", AttemptRole.PREFILL),
            ("d1", AttemptRole.DECODE),
        ]
        assert (record.usage.prompt_tokens, record.usage.hit_tokens, record.usage.output_tokens) == (10, 8, 1)
        assert b"kv_transfer_params" not in shown


async def test_other_protocols_are_translated_for_both(tmp_path: Path) -> None:
    async with separated(tmp_path, "vllm") as ((prefill,), (decode,), client):
        prefill.script, decode.script = computed(kv_transfer_params=KEPT), Script(events=stream(["well"]))
        body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        async with client.session.post(f"{client.url}/v1/messages", json=body) as response:
            shown = (await response.read()).decode()
        assert "message_stop" in shown
        assert '"cache_read_input_tokens":8' in shown
        assert prefill.asked[0].path == decode.asked[0].path == "/v1/chat/completions"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_prefilling_engine_that_is_gone_leaves_its_place_to_another(kind: str, tmp_path: Path) -> None:
    async with separated(tmp_path, kind, prefills=2, health={"interval_s": 30.0}) as (prefills, (decode,), client):
        decode.script = Script(events=stream(["well"]))
        for prefill in prefills:
            prefill.script = computed(kv_transfer_params=KEPT)
        await prefills[0].close()
        for _ in range(4):
            assert b"well" in await _read(client, stream=True)
        records = await client.records(4)
        assert all(record.outcome is Outcome.OK for record in records)
        failed = [a for record in records for a in record.attempts if a.error == "connect_failed"]
        assert len(failed) <= 1
        assert all(attempt.instance == "p0" for attempt in failed)
        assert client.at_rest()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_decoding_engine_that_is_gone_leaves_its_place_to_another(kind: str, tmp_path: Path) -> None:
    async with separated(tmp_path, kind, decodes=2, health={"interval_s": 30.0}) as ((prefill,), decodes, client):
        prefill.script = computed(kv_transfer_params=KEPT)
        for decode in decodes:
            decode.script = Script(events=stream(["well"]))
        await decodes[0].close()
        for _ in range(4):
            assert b"well" in await _read(client, stream=True)
        assert len(decodes[1].asked) == 4
        await client.until(client.at_rest)


async def test_nobody_waits_for_pages_that_will_not_come(tmp_path: Path) -> None:
    """SGLang's decoding engine waits in the room: when the other one fails, it is let go at once."""
    async with separated(tmp_path, "sglang") as ((prefill,), (decode,), client):
        prefill.script = Script(status=500, body={"error": {"message": "out of memory"}})
        decode.script = Script(events=stream(["never"]), wait_for=asyncio.Event())
        async with client.chat(stream=True) as response:
            assert response.status == 502
        await decode.until(lambda: decode.hung_up == 1)
        (record,) = await client.records(1)
        assert {(a.role, a.error) for a in record.attempts} == {
            (AttemptRole.PREFILL, "status_500"), (AttemptRole.DECODE, "given_up")
        }  # fmt: skip
        await client.until(client.at_rest)


async def test_a_stream_outlives_its_decoding_engine(tmp_path: Path) -> None:
    """The prompt and the words that were delivered are computed by the prefilling engine, and decoded by another."""
    async with separated(tmp_path, "vllm", decodes=2) as ((prefill,), decodes, client):
        prompts = [computed(3, kv_transfer_params=KEPT), computed(9, kv_transfer_params=KEPT)]
        prefill.script_for = lambda asked: prompts.pop(0)
        scripts = [
            Script(events=stream(["one ", "two"])[:3], end="reset"),
            Script(events=stream([" three"], prompt=14)),
        ]
        for decode in decodes:
            decode.script_for = lambda asked: scripts.pop(0)
        shown = (await _read(client, stream=True)).decode()
        chunks = [json.loads(line[6:]) for line in shown.splitlines() if line.startswith("data: {")]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "one two three"
        last = prefill.asked[-1].json
        assert last["messages"][-1] == {"role": "assistant", "content": "one two"}
        assert last["continue_final_message"] is True
        (record,) = await client.records(1)
        roles = [attempt.role for attempt in record.attempts]
        assert roles == [AttemptRole.PREFILL, AttemptRole.DECODE, AttemptRole.PREFILL, AttemptRole.CONTINUATION]
        assert record.usage.hit_tokens == 3  # what the client's prompt hit, before anything died


async def test_one_half_alone_answers_nothing(tmp_path: Path) -> None:
    async with separated(tmp_path, "sglang", prefills=1, decodes=0) as ((prefill,), _, client):
        async with client.chat() as response:
            assert response.status == 503
        assert not prefill.asked


async def test_the_engine_with_the_least_to_do_decodes(tmp_path: Path) -> None:
    async with separated(tmp_path, "vllm", prefills=2, decodes=2) as (prefills, decodes, client):
        gate = asyncio.Event()
        for prefill in prefills:
            prefill.script = computed(kv_transfer_params=KEPT)
        for decode in decodes:
            decode.script = Script(
                events=[event(chunk({"content": "x"})), *stream(["y"])], pause=lambda n: gate if n == 1 else None
            )
        waiting = [asyncio.create_task(_read(client, stream=True)) for _ in range(6)]
        await asyncio.gather(*(decode.until(partial(_has_three, decode)) for decode in decodes))
        gate.set()
        await asyncio.gather(*waiting)
        assert [len(decode.asked) for decode in decodes] == [3, 3]


async def test_the_engine_that_has_the_prefix_computes_the_prompt(tmp_path: Path) -> None:
    async with separated(tmp_path, "vllm", prefills=2, decodes=2) as (prefills, decodes, client):
        for prefill in prefills:
            prefill.script = computed(kv_transfer_params=KEPT)
        for decode in decodes:
            decode.script = Script(events=stream(["y"]))
        long = [{"role": "user", "content": " ".join(f"word{n}" for n in range(3000))}]
        for _ in range(5):
            await _read(client, stream=True, messages=long)
        assert sorted(len(prefill.asked) for prefill in prefills) == [0, 5]


def _has_three(engine: ScriptedEngine) -> bool:
    return engine.in_flight == 3


async def _read(client: Client, **body: Any) -> bytes:
    if not body.get("stream"):
        body.pop("stream_options", None)
    async with client.chat(**body) as response:
        assert response.status == 200, await response.read()
        return bytes(await response.read())
