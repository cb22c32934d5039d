"""Anthropic's Messages through the gateway, with the official client: translated, and to engines that speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from tests.gateways import Client, gateway_for
from tests.samples.answers import THOUGHT_AND_TWO_CALLS, THOUGHT_AND_TWO_CALLS_WHOLE, streamed, whole
from tests.samples.sdk import anthropic_client, strictly
from tests.scripted_engine import Json, Script, ScriptedEngine, answer, stream
from tracing.record import Outcome, UsageSource

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Json = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
TOOLS: list[Any] = [
    {
        "name": "look",
        "description": "Look up",
        "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
    {"name": "find", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(running_engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with gateway_for([running_engine], tmp_path_factory.mktemp("home")) as client:
        yield client
        assert client.at_rest()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(gateway: Client) -> AsyncIterator[AsyncAnthropic]:
    async with anthropic_client(gateway.url) as client:
        yield client


async def test_a_message_is_asked_as_a_chat_and_answered_as_a_message(
    gateway: Client, engine: ScriptedEngine, claude: AsyncAnthropic
) -> None:
    engine.script = Script(body=answer("hello", prompt=100, output=7, cached=64))
    message = strictly(await claude.messages.create(**ASK))
    (block,) = message.content
    assert (block.type, block.text, message.stop_reason, message.model) == ("text", "hello", "end_turn", "m")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (36, 64, 0)
    assert usage.output_tokens == 7
    assert engine.asked[0].path == "/v1/chat/completions"
    assert engine.asked[0].json == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 64,
        "return_cached_tokens_details": True,
    }
    assert message._request_id is not None
    record = await gateway.record(message._request_id)
    assert (record.endpoint, record.outcome, record.usage.prompt_tokens) == ("messages", Outcome.OK, 100)
    assert (record.usage.hit_tokens, record.usage.output_tokens) == (64, 7)


async def test_what_is_said_of_a_document_and_which_tools_were_found_is_told(
    engine: ScriptedEngine, claude: AsyncAnthropic
) -> None:
    parts = {"type": "content", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    text = {"type": "text", "media_type": "text/plain", "data": "words"}
    read: list[Any] = [
        {"type": "document", "title": "T", "context": "C", "source": text},
        {"type": "document", "title": "P", "source": parts},
        {"type": "document", "source": {"type": "content", "content": "bare"}},
    ]
    found: list[Any] = [
        {"type": "tool_reference", "tool_name": "look"},
        {"type": "tool_reference", "tool_name": "find"},
    ]
    messages: list[Any] = [
        {"role": "user", "content": read},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]},
    ]
    await claude.messages.create(model="m", max_tokens=9, messages=messages, tools=TOOLS)
    said = [message["content"] for message in engine.asked[0].json["messages"]]
    assert (said[0], said[-1]) == ("T\nC\nwords\nP\none\ntwo\nbare", "look\nfind")


async def test_the_whole_vocabulary_reaches_the_engine(engine: ScriptedEngine, claude: AsyncAnthropic) -> None:
    messages: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aWk="}},
                {"type": "image", "source": {"type": "url", "url": "https://x.example/i.png"}},
                {
                    "type": "document",
                    "title": "d",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": "cGRm"},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "text", "text": "I "},
                {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "find", "input": {"INVALID_JSON": '{"x":'}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}]},
            ],
        },
        {"role": "system", "content": "mind the step"},
    ]
    await claude.messages.create(
        model="m",
        max_tokens=9,
        messages=messages,
        system=[
            {"type": "text", "text": "Be"},
            {"type": "text", "text": "kind.", "cache_control": {"type": "ephemeral"}},
        ],
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        extra_body={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            "context_management": {"edits": []},
            "chat_template_kwargs": {"b": 1, "a": 2},
        },
    )
    asked = engine.asked[0].json
    assert asked.pop("messages") == [
        {"role": "system", "content": "Be\nkind."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aWk="}},
                {"type": "image_url", "image_url": {"url": "https://x.example/i.png"}},
                {"type": "file", "file": {"filename": "d", "file_data": "data:application/pdf;base64,cGRm"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
                {"id": "t2", "type": "function", "function": {"name": "find", "arguments": '{"x":'}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "two"},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "mind the step"},
    ]
    look = {"name": "look", "description": "Look up", "parameters": TOOLS[0]["input_schema"]}
    assert asked == {
        "model": "m",
        "tools": [
            {"type": "function", "function": look},
            {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 9,
        "stop": ["END"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
        "reasoning_effort": "low",
        "user": "u",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "chat_template_kwargs": {"b": 1, "a": 2},
        "return_cached_tokens_details": True,
    }


async def test_b013_thought_text_and_two_calls_are_the_same_streamed_and_whole(
    engine: ScriptedEngine, claude: AsyncAnthropic
) -> None:
    engine.script = Script(body=whole(THOUGHT_AND_TWO_CALLS_WHOLE, "tool_calls", prompt=20, cached=16))
    message = strictly(await claude.messages.create(**ASK, tools=TOOLS))
    engine.script = Script(events=streamed(THOUGHT_AND_TWO_CALLS, "tool_calls", prompt=20, cached=16))
    async with claude.messages.stream(**ASK, tools=TOOLS) as events:
        seen = [event async for event in events]
        streamed_message = strictly(await events.get_final_message())
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.to_dict() for block in streamed_message.content] == [block.to_dict() for block in message.content]
    assert [b.input for b in message.content if b.type == "tool_use"] == [{"x": 1}, {"y": "Grüße"}]
    assert (message.stop_reason, streamed_message.stop_reason) == ("tool_use", "tool_use")
    assert (streamed_message.usage.input_tokens, streamed_message.usage.cache_read_input_tokens) == (4, 16)
    raw = [event for event in seen if event.type.startswith(("message_", "content_block_"))]
    for event in raw:
        strictly(event)
    open_blocks: list[int] = []
    for event in raw:  # one block at a time, numbered from 0
        if event.type == "content_block_start":
            assert not open_blocks
            open_blocks.append(event.index)
        elif event.type == "content_block_delta":
            assert open_blocks == [event.index]
        elif event.type == "content_block_stop":
            assert open_blocks.pop() == event.index
    assert [e.index for e in raw if e.type == "content_block_start"] == [0, 1, 2, 3]
    assert [e.type for e in raw[-2:]] == ["message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("finish", "more", "stop_reason", "stop_sequence"),
    [
        ("stop", {}, "end_turn", None),
        ("stop", {"matched_stop": 2}, "end_turn", None),
        ("stop", {"matched_stop": "END"}, "stop_sequence", "END"),
        ("stop", {"stop_reason": "END"}, "stop_sequence", "END"),
        ("length", {}, "max_tokens", None),
        ("content_filter", {}, "refusal", None),
        ("eos_token", {}, "end_turn", None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_stop_reasons(
    engine: ScriptedEngine,
    claude: AsyncAnthropic,
    finish: str,
    more: Json,
    stop_reason: str,
    stop_sequence: str | None,
    streams: bool,
) -> None:
    engine.script = (
        Script(events=streamed([{"content": "x"}], finish, **more))
        if streams
        else Script(body=whole({"content": "x"}, finish, **more))
    )
    if streams:
        async with claude.messages.stream(**ASK) as events:
            message = await events.get_final_message()
    else:
        message = await claude.messages.create(**ASK)
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, stop_sequence)


@pytest.mark.parametrize("streams", [False, True])
async def test_calls_that_an_engine_names_carelessly_can_be_answered(
    engine: ScriptedEngine, claude: AsyncAnthropic, streams: bool
) -> None:
    """Without an id, or with one that is a number, and with arguments that are no text but the object itself."""
    calls: list[Json] = [
        {"index": 0, "type": "function", "function": {"name": "look", "arguments": {"x": 1}}},
        {"index": 1, "id": 0, "type": "function", "function": {"name": "find", "arguments": "{}"}},
    ]
    if streams:
        engine.script = Script(events=streamed([{"tool_calls": [call]} for call in calls], "tool_calls"))
        async with claude.messages.stream(**ASK, tools=TOOLS) as events:
            message = await events.get_final_message()
    else:
        engine.script = Script(body=whole({"content": None, "tool_calls": calls}, "tool_calls"))
        message = await claude.messages.create(**ASK, tools=TOOLS)
    look, find = message.content
    assert look.type == find.type == "tool_use"
    assert (look.name, look.input, find.name, find.input) == ("look", {"x": 1}, "find", {})
    assert look.id
    assert find.id
    assert look.id != find.id


async def test_thoughts_are_hidden_from_who_turned_thinking_off(engine: ScriptedEngine, claude: AsyncAnthropic) -> None:
    engine.script = Script(events=streamed([{"reasoning": "hm"}, {"content": "x"}]))
    async with claude.messages.stream(**ASK, thinking={"type": "disabled"}) as events:
        message = await events.get_final_message()
    assert [block.type for block in message.content] == ["text"]


async def test_r02_a_stream_that_breaks_ends_with_an_error_and_no_stop_reason(
    gateway: Client, engine: ScriptedEngine, claude: AsyncAnthropic
) -> None:
    engine.script = Script(events=stream(["a", "b"])[:3], end="reset")
    kinds: list[str] = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        await _read(claude, kinds)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert kinds[0] == "message_start"
    assert not {"message_delta", "message_stop"} & set(kinds)
    record = await gateway.record(caught.value.body["request_id"])  # type: ignore[index]
    assert (record.outcome, record.error) == (Outcome.TRUNCATED, "stream_truncated")


async def _read(claude: AsyncAnthropic, kinds: list[str]) -> None:
    async for event in await claude.messages.create(**ASK, stream=True):
        kinds.append(event.type)  # noqa: PERF401 - what came before the stream broke counts


async def test_an_error_in_the_engines_stream_is_one_in_the_clients(
    engine: ScriptedEngine, claude: AsyncAnthropic
) -> None:
    engine.script = Script(events=[*stream(["a"])[:2], b'data: {"error":{"message":"out of memory","type":"oom"}}\n\n'])
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        await _read(claude, [])


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (404, "not_found_error", anthropic.NotFoundError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
    ],
)
async def test_an_engines_refusal_comes_in_anthropics_shape(
    engine: ScriptedEngine, claude: AsyncAnthropic, status: int, kind: str, error: type[anthropic.APIStatusError]
) -> None:
    body = {"object": "error", "message": "too much", "type": "BadRequestError", "code": status}
    headers = {"retry-after": "7", "x-ratelimit-remaining-requests": "0", "x-internal": "secret"}
    engine.script = Script(status=status, body=body, headers=headers)
    with pytest.raises(error) as caught:
        await claude.messages.create(**ASK)
    told = caught.value.body
    assert isinstance(told, dict)
    assert (told["type"], told["error"]) == ("error", {"type": kind, "message": "too much"})
    shown = caught.value.response.headers
    assert (shown["retry-after"], shown["x-ratelimit-remaining-requests"]) == ("7", "0")
    assert "x-internal" not in shown


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "emperor", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_translated_is_refused_by_name(
    gateway: Client, engine: ScriptedEngine, change: Json, where: str
) -> None:
    async with gateway.session.post(f"{gateway.url}/v1/messages", json=ASK | change) as response:
        assert response.status == 400
        told = await response.json()
        assert told["request_id"] == response.headers["request-id"]
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert where in told["error"]["message"]
    assert engine.asked == []


@pytest.mark.parametrize("body", [b"{bad", b"[]", b"null", b'"x"', b""])
async def test_b024_malformed_bodies_are_400_in_anthropics_shape(gateway: Client, body: bytes) -> None:
    for path in ("/v1/messages", "/messages", "/c/x/v1/messages", "/v1/messages/count_tokens"):
        async with gateway.session.post(f"{gateway.url}{path}", data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_an_agents_steps_are_one_run_and_the_label_is_its_agent(gateway: Client, engine: ScriptedEngine) -> None:
    engine.script_for = lambda asked: (
        Script(body=whole(THOUGHT_AND_TWO_CALLS_WHOLE, "tool_calls"))
        if len(asked.json["messages"]) == 1
        else Script(events=streamed([{"content": "done"}]))
    )
    messages: list[Any] = [{"role": "user", "content": "two look-ups, please"}]
    ask: Json = {"model": "m", "max_tokens": 64, "tools": TOOLS}
    async with anthropic_client(f"{gateway.url}/c/clerk%20one") as claude:
        first = await claude.messages.create(**ask, messages=messages)
        ids = [block.id for block in first.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": [block.to_dict() for block in first.content]})
        results = [{"type": "tool_result", "tool_use_id": identity, "content": "1"} for identity in ids]
        messages.append({"role": "user", "content": results})
        async with claude.messages.stream(**ask, messages=messages) as events:
            assert await events.get_final_text() == "done"
            second = events.response.headers["request-id"]
    records = [await gateway.record(request_id) for request_id in (str(first._request_id), second)]
    assert len({record.link.run_id for record in records if record.link is not None}) == 1
    assert [record.link.method for record in records if record.link] == ["new", "tool_call_id"]
    assert records[1].tool_results == ("call_a", "call_b")
    assert {record.labels["agent"] for record in records} == {"clerk one"}


NATIVE = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",'
    b'"model":"real","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":3,'
    b'"cache_read_input_tokens":5,"cache_creation_input_tokens":2,"output_tokens":1}}}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    b'"content_block":{"type":"text","text":""}}\n\n',
    b'event: ping\ndata: {"type": "ping"}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"hi"}}\n\n',
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
    b'"usage":{"output_tokens":9}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]


async def test_bytes_of_an_engine_that_speaks_messages_pass_both_ways(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        key = {"api_key": "sk-upstream", "api_key_header": "x-api-key"}
        instances = [{"id": "n", "url": engine.url, "adapter": "openai", "speaks": ["chat", "messages"], **key}]
        sent = {"anthropic-version": "2023-06-01", "anthropic-beta": "b", "x-api-key": "sk-mine", "x-other": "1"}
        async with gateway_for([engine], tmp_path, instances=instances) as gateway:
            body = b'{"stream":true,"model":"m","messages":[{"role":"user","content":"\\u00e9"}],"tools":[{"type":1}]}'
            engine.script = Script(events=NATIVE)
            async with gateway.session.post(f"{gateway.url}/v1/messages", data=body, headers=sent) as response:
                assert await response.read() == b"".join(NATIVE)
            got = engine.asked[0].headers
            passed = ("anthropic-version", "anthropic-beta", "x-api-key")
            assert [got[name] for name in passed] == ["2023-06-01", "b", "sk-upstream"]
            assert "x-other" not in got
            assert (engine.asked[0].path, engine.asked[0].body) == ("/v1/messages", body)
            error = b'{"type":"error","error":{"type":"overloaded_error","message":"x"}}'
            engine.script = Script(status=529, body=error)
            async with gateway.session.post(f"{gateway.url}/v1/messages", data=body) as response:
                assert (response.status, await response.read()) == (529, error)
            record, refused = await gateway.records(2)
    usage = record.usage
    assert (usage.fresh_tokens, usage.hit_tokens, usage.write_5m_tokens, usage.output_tokens) == (3, 5, 2, 9)
    assert (usage.source, record.finish_reason, record.outcome) == (UsageSource.ENGINE, "stop", Outcome.OK)
    assert refused.outcome is Outcome.UPSTREAM_FAILED


@pytest.mark.parametrize("missing", ["message_stop", "the reason"])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_native_message_is_whole_once_it_says_why_it_stopped(
    tmp_path: Path, missing: str, leaves: bool
) -> None:
    """Whether it is its client that leaves then, or its engine."""
    never, held = asyncio.Event(), len(NATIVE) - {"message_stop": 1, "the reason": 2}[missing]
    async with ScriptedEngine() as engine:
        instances = [{"id": "n", "url": engine.url, "adapter": "openai", "speaks": ["chat", "messages"]}]
        async with gateway_for([engine], tmp_path, instances=instances) as gateway:
            engine.script = (
                Script(events=NATIVE, pause=lambda number: never if number == held else None)
                if leaves
                else Script(events=NATIVE[:held], end="reset")
            )
            ask = {**ASK, "stream": True}
            async with gateway.session.post(f"{gateway.url}/v1/messages", json=ask) as response:
                for _ in range(held):
                    await response.content.readuntil(b"\n\n")
                if not leaves:
                    assert (await response.read() == NATIVE[-1]) is (missing == "message_stop")
                response.close()
            (record,) = await gateway.records(1)
    failed = Outcome.ABORTED if leaves else Outcome.TRUNCATED
    assert record.outcome is (Outcome.OK if missing == "message_stop" else failed)


async def test_an_engine_that_speaks_messages_counts_what_only_it_can_read(tmp_path: Path) -> None:
    """Where it has no counter, the request is counted as others are, or refused."""
    async with ScriptedEngine() as engine:
        instances = [{"id": "n", "url": engine.url, "adapter": "sglang", "speaks": ["messages", "tokenize"]}]
        search: Any = {"type": "web_search_20250305", "name": "web_search"}
        async with (
            gateway_for([engine], tmp_path, instances=instances) as gateway,
            anthropic_client(gateway.url) as claude,
        ):
            engine.pages["/v1/messages/count_tokens"] = b'{"input_tokens": 7}'
            told = await claude.beta.messages.count_tokens(
                model="m", messages=ASK["messages"], tools=[search], betas=["x"]
            )
            assert told.input_tokens == 7
            asked = engine.looked_up[-1]
            assert (asked.path, asked.json["tools"]) == ("/v1/messages/count_tokens", [search])
            assert asked.headers["anthropic-version"] == claude.default_headers["anthropic-version"]
            assert "x" in asked.headers["anthropic-beta"]
            engine.pages.clear()
            engine.script = Script(body={"tokens": [1, 2], "count": 2})
            told = await claude.messages.count_tokens(model="m", messages=ASK["messages"])
            assert (told.input_tokens, engine.asked[-1].path) == (2, "/tokenize")
            with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
                await claude.messages.count_tokens(model="m", messages=ASK["messages"], tools=[search])


async def test_a_tenants_salt_is_never_lost_to_an_engine_that_has_no_place_for_it_in_messages(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        instances = [{"id": "n", "url": engine.url, "adapter": "sglang", "speaks": ["chat", "messages"]}]
        keys = [{"id": "k", "secret": "sk-t", "tenant": "t"}]
        async with (
            gateway_for([engine], tmp_path, instances=instances, keys=keys) as gateway,
            anthropic_client(gateway.url, key="sk-t") as claude,
        ):
            await claude.messages.create(**ASK)
    assert engine.asked[0].path == "/v1/chat/completions"
    assert json.loads(engine.asked[0].body)["cache_salt"]


@pytest.mark.parametrize("speaks", [["chat"], ["chat", "messages"]])
async def test_a_conversation_that_no_engine_holds_is_refused_so_that_clients_send_all_of_it(
    tmp_path: Path, speaks: list[str]
) -> None:
    """SGLang and vLLM would pass the member over, and take what it continues for the whole conversation."""
    async with ScriptedEngine() as engine:
        instances = [{"id": "n", "url": engine.url, "adapter": "sglang", "speaks": speaks}]
        engine.pages["/v1/messages/count_tokens"] = b'{"input_tokens": 7}'
        async with gateway_for([engine], tmp_path, instances=instances) as gateway:
            async with gateway.session.post(
                f"{gateway.url}/v1/messages", json={**ASK, "thread": {"type": "create"}}
            ) as response:
                error = (await response.json())["error"]
            counter = f"{gateway.url}/v1/messages/count_tokens"
            async with gateway.session.post(counter, json={**ASK, "thread": {"type": "create"}}) as uncounted:
                assert (uncounted.status, (await uncounted.json())["error"]) == (400, error)
            async with gateway.session.post(f"{gateway.url}/v1/messages", json=ASK) as whole:
                assert whole.status == 200
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert len(engine.asked) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_turn_of_a_conversation_that_its_engine_holds_is_a_step_of_the_same_run(
    tmp_path: Path, streams: bool
) -> None:
    async with ScriptedEngine() as engine:
        instances = [{"id": "n", "url": engine.url, "adapter": "openai", "speaks": ["messages"]}]
        spoken = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}]}
        counts = {"input_tokens": 3, "output_tokens": 1}
        message = {"id": "msg_1", "model": "m", **spoken, "stop_reason": "end_turn", "usage": counts}
        engine.script = Script(events=NATIVE) if streams else Script(body=message)
        async with gateway_for([engine], tmp_path, instances=instances) as gateway:
            for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
                ask = {**ASK, "thread": thread, "stream": streams}
                async with gateway.session.post(f"{gateway.url}/v1/messages", json=ask) as response:
                    await response.read()
            records = await gateway.records(2)
    assert [asked.json["thread"]["type"] for asked in engine.asked] == ["create", "continue"]
    links = [record.link for record in records if record.link is not None]
    assert [link.method for link in links] == ["new", "previous_response_id"]
    assert len({link.run_id for link in links}) == 1
