"""Engines that answer what no engine should: the client hears of it plainly, in its protocol, and of nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest
import pytest_asyncio

from gateway.protocols.seen import Seen
from tests.gateways import Client, gateway_for
from tests.scripted_engine import DONE, Json, Script, ScriptedEngine, answer, chunk, event, stream, usage_chunk
from tracing.record import Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(running_engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    health = {"interval_s": 0.05, "timeout_s": 2.0, "breaker_failures": 1000}
    async with gateway_for([running_engine], tmp_path_factory.mktemp("home"), health=health) as client:
        yield client
        assert client.at_rest()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_compressed_answer_is_refused_and_never_shown(
    gateway: Client, engine: ScriptedEngine, is_stream: bool
) -> None:
    packed: Json = {"headers": {"content-encoding": "gzip"}}
    whole = json.dumps(answer("secret words")).encode()
    if is_stream:
        engine.script = Script(events=[gzip.compress(b"".join(stream(["secret words"])))], **packed)
    else:
        engine.script = Script(body=gzip.compress(whole), **packed)
    async with gateway.chat(stream=is_stream) as response:
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "engine_compressed"
        record = await gateway.record(response.headers["x-keepwarm-request-id"])
    assert (record.outcome, record.error) == (Outcome.UPSTREAM_FAILED, "engine_compressed")
    assert engine.asked[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(("path", "more"), [("chat/completions", {}), ("messages", {"max_tokens": 4})])
@pytest.mark.parametrize("status", [204, 302, 401, 407])
async def test_a_refusal_that_is_not_about_the_client_is_not_told_as_one(
    gateway: Client, engine: ScriptedEngine, status: int, path: str, more: Json
) -> None:
    words = {"error": {"message": "Incorrect API key provided: sk-of-the-engine", "type": "invalid_request_error"}}
    body = b"" if status == 204 else json.dumps(words).encode()
    engine.script = Script(status=status, body=body, headers={"location": "http://elsewhere/"})
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    async with gateway.session.post(f"{gateway.url}/v1/{path}", json=asked, allow_redirects=False) as response:
        assert response.status == 502
        assert "location" not in response.headers
        said = await response.text()
        record = await gateway.record(response.headers["x-keepwarm-request-id"])
    assert str(status) in json.loads(said)["error"]["message"]
    assert "sk-of-the-engine" not in said
    assert (record.outcome, record.status, record.error) == (Outcome.UPSTREAM_FAILED, 502, f"engine_{status}")


@pytest.mark.parametrize(
    ("path", "more"), [("chat/completions", {}), ("messages", {"max_tokens": 4}), ("responses", {})]
)
@pytest.mark.parametrize("fault", [ZeroDivisionError, TimeoutError])
async def test_a_fault_of_the_gateway_amid_a_stream_ends_it_with_an_error(
    gateway: Client,
    engine: ScriptedEngine,
    path: str,
    more: Json,
    fault: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = 0

    def failing(self: Seen, choice: Json) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise fault

    monkeypatch.setattr(Seen, "finish", failing)
    engine.script = Script(events=stream(["a", "b", "c"]))
    said = {"input": "hi"} if path == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    asked = {"model": "m", "stream": True, **said, **more}
    async with gateway.session.post(f"{gateway.url}/v1/{path}", json=asked) as response:
        assert response.status == 200
        data = await response.read()  # which ends, and as a whole body
        record = await gateway.record(response.headers["x-keepwarm-request-id"])
    events = [event for event in data.split(b"\n\n") if event]
    assert b"the gateway failed" in b"".join(events[-2:])
    assert (events[-1] == b"data: [DONE]") == (path == "chat/completions")
    assert b"ZeroDivision" not in data
    assert b"going down" not in data
    assert record.outcome is not Outcome.OK
    await engine.until(lambda: not engine.in_flight)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "more"), [("chat/completions", {}), ("messages", {"max_tokens": 4}), ("responses", {})]
)
async def test_a_character_that_an_engine_cut_in_two_is_whole(
    gateway: Client, engine: ScriptedEngine, path: str, more: Json, streams: bool
) -> None:
    pieces = ["a", "\ud83d", "\ude00b", "\ud83d"]
    whole = json.dumps(answer("".join(pieces))).encode()
    cut = [b"data: " + json.dumps(chunk({"content": piece})).encode() + b"\n\n" for piece in pieces]
    engine.script = Script(events=[*cut, *stream([])[1:]]) if streams else Script(body=whole)
    said = {"input": "hi"} if path == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    asked = {"model": "m", "stream": streams, **said, **more}
    async with gateway.session.post(f"{gateway.url}/v1/{path}", json=asked) as response:
        assert response.status == 200
        shown = (await response.read()).decode()
    lines = [line[6:] for line in shown.splitlines() if line.startswith("data: {")] if streams else [shown]
    text = json.dumps([json.loads(line) for line in lines], ensure_ascii=False)
    assert [text.count(each) > 0 for each in ("😀b", "\ufffd")] == [True, True]
    text.encode()  # there is no half in it


@pytest.mark.parametrize("headers", [{}, {"te": "trailers"}], ids=["front", "aiohttp"])
async def test_no_second_answer_gets_into_a_stream_that_has_begun(
    engine: ScriptedEngine, tmp_path: Path, headers: dict[str, str]
) -> None:
    late = asyncio.Event()
    engine.script = Script(body=answer("x"), wait_for=late)  # the engine doesn't heed that a stream was asked for
    async with gateway_for([engine], tmp_path, stream={"heartbeat_s": 0.02}) as client:
        async with client.chat(headers, stream=True) as response:
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b": keepwarm\n\n"
            late.set()
            data = (await response.read()).replace(b": keepwarm\n\n", b"")
        assert b"HTTP/1.1" not in data
        assert data.startswith(b'data: {"error":')
        assert data.endswith(DONE)
        (record,) = await client.records(1)
        assert record.outcome in (Outcome.TRUNCATED, Outcome.UPSTREAM_FAILED)
        assert client.at_rest()


async def test_a_refusals_headers_pass_where_they_are_text(gateway: Client, engine: ScriptedEngine) -> None:
    odd = {"retry-after": "7", "x-ratelimit-remaining-requests": "0", "x-ratelimit-odd": "\u00e9"}
    engine.script = Script(status=400, body={"error": {"message": "no"}}, headers=odd)
    async with gateway.chat({"te": "trailers"}) as response:  # which is served on aiohttp's side
        assert response.status == 400
        assert response.headers["retry-after"] == "7"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-ratelimit-odd" not in response.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_in_one_piece_where_a_stream_was_asked_for_is_no_silent_empty_stream(
    gateway: Client, engine: ScriptedEngine, path: str
) -> None:
    engine.script = Script(body=answer("all at once"))
    body = {"model": "m", "stream": True, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    async with gateway.session.post(f"{gateway.url}{path}", json=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_no_stream")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("member", ["kv_transfer_params", "bootstrap_host"])
async def test_whose_pages_an_engine_takes_is_no_clients_business(
    gateway: Client, engine: ScriptedEngine, path: str, member: str
) -> None:
    foreign = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_block_ids": [7]}}
    body = {"model": "m", "max_tokens": 8, "input": "x", "messages": [{"role": "user", "content": "x"}]}
    body |= {member: foreign.get(member, "10.0.0.9")}
    async with gateway.session.post(f"{gateway.url}{path}", json=body) as response:
        assert response.status == 400
        assert member in (await response.json())["error"]["message"]
    assert engine.asked == []


def call(**function: object) -> Json:
    return chunk({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", **function}}]})


ODD_WAYS: dict[str, tuple[list[Json], list[Json]]] = {
    "no arguments": ([call()], [{"type": "tool_use", "name": "f", "input": {}}]),
    "blank arguments": ([call(arguments=" ")], [{"type": "tool_use", "name": "f", "input": {}}]),
    "a space before them": (
        [call(arguments=" "), chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]})],
        [{"type": "tool_use", "name": "f", "input": {"x": 1}}],
    ),
    "a call from before there were tools": (
        [chunk({"function_call": {"name": "f", "arguments": '{"x"'}}), chunk({"function_call": {"arguments": ":1}"}})],
        [{"type": "tool_use", "name": "f", "input": {"x": 1}}],
    ),
    "content in parts": (
        [
            chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}),
            chunk({"content": [{"type": "text", "text": "an"}, {"type": "text", "text": "swer"}]}),
            chunk({"content": "!"}),
        ],
        [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "answer!"}],
    ),
}


@pytest.mark.parametrize("way", ODD_WAYS)
async def test_whatever_way_an_engine_says_it_the_official_clients_read_it(
    gateway: Client, engine: ScriptedEngine, way: str
) -> None:
    said, blocks = ODD_WAYS[way]
    engine.script = Script(
        events=[event(each) for each in (*said, chunk({}, finish="stop"), usage_chunk(10, 5))] + [DONE]
    )
    asked: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    async with (
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0) as messages,
        messages.messages.stream(**asked) as events,
    ):
        message = await events.get_final_message()
    shown = [block.model_dump(include=set(expected)) for block, expected in zip(message.content, blocks, strict=True)]
    assert shown == blocks
    is_call = blocks[-1]["type"] == "tool_use"
    assert message.stop_reason == ("tool_use" if is_call else "end_turn")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        async with client.responses.stream(model="m", input="hi") as items:
            response = await items.get_final_response()
        async with await client.chat.completions.create(model="m", messages=asked["messages"], stream=True) as chunks:
            request_id = chunks.response.headers["x-keepwarm-request-id"]
            async for _ in chunks:
                pass
    last = response.output[-1]
    if is_call:
        assert last.type == "function_call"
        assert (last.name, json.loads(last.arguments)) == (blocks[-1]["name"], blocks[-1]["input"])
    else:
        assert response.output_text == blocks[-1]["text"]
    record = await gateway.record(request_id)
    assert [called.name for called in record.tool_calls] == (["f"] if is_call else [])


async def test_a_response_that_fails_before_it_began_is_one_that_began_and_failed(
    gateway: Client, engine: ScriptedEngine
) -> None:
    engine.script = Script(events=[event({"error": {"message": "no room", "type": "server_error"}})])
    async with (
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
        client.responses.stream(model="m", input="hi") as events,
    ):
        kinds = [each.type async for each in events]
    assert kinds == ["response.created", "response.in_progress", "error", "response.failed"]
