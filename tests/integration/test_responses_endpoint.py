"""OpenAI's Responses through the gateway, with the official client: translated, continued, kept, and native."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.protocols.responses import protocol
from tests.gateways import Client, gateway_for
from tests.samples.answers import THOUGHT_AND_TWO_CALLS, THOUGHT_AND_TWO_CALLS_WHOLE, call_piece, streamed, whole
from tests.samples.sdk import openai_client, strictly
from tests.scripted_engine import Json, Script, ScriptedEngine, answer, stream
from tracing.record import Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS: list[Any] = [
    {"type": "function", "name": "look", "description": "Look up", "parameters": {"type": "object"}, "strict": True},
    {"type": "function", "name": "find", "parameters": None, "strict": None},
]
KEYS = [{"id": name, "secret": f"sk-{name}", "tenant": name} for name in ("a", "b")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(running_engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with gateway_for([running_engine], tmp_path_factory.mktemp("home"), keys=KEYS) as client:
        yield client
        assert client.at_rest()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gpt(gateway: Client) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(gateway.url, key="sk-a") as client:
        yield client


async def test_a_response_is_asked_as_a_chat_and_answered_as_a_response(
    gateway: Client, engine: ScriptedEngine, gpt: AsyncOpenAI
) -> None:
    engine.script = Script(body=answer("hello", prompt=100, output=7, cached=64))
    response = strictly(await gpt.responses.create(model="m", input="hi", metadata={"k": "v"}, temperature=0.5))
    assert (response.status, response.output_text, response.model) == ("completed", "hello", "m")
    assert (response.metadata, response.temperature, response.tools) == ({"k": "v"}, 0.5, [])
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (100, 64)
    assert (usage.output_tokens, usage.total_tokens) == (7, 107)
    asked = engine.asked[0]
    assert asked.path == "/v1/chat/completions"
    assert asked.json["messages"] == [{"role": "user", "content": "hi"}]
    assert response._request_id is not None
    record = await gateway.record(response._request_id)
    assert (record.endpoint, record.usage.prompt_tokens, record.usage.hit_tokens) == ("responses", 100, 64)


async def test_the_whole_vocabulary_reaches_the_engine(engine: ScriptedEngine, gpt: AsyncOpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "brief"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": "data:image/png;base64,aWk=", "detail": "low"},
                {"type": "input_file", "filename": "d.pdf", "file_data": "data:application/pdf;base64,cGRm"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"x":1}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    await gpt.responses.create(
        model="m",
        input=items,
        instructions="Be kind.",
        tools=TOOLS,
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        max_output_tokens=99,
        top_p=0.9,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=2,
        truncation="disabled",
        prompt_cache_key="run",
        extra_body={"chat_template_kwargs": {"b": 1}, "client_metadata": {"x": 1}},
    )
    asked = engine.asked[0].json
    assert asked.pop("messages") == [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aWk=", "detail": "low"}},
                {"type": "file", "file": {"filename": "d.pdf", "file_data": "data:application/pdf;base64,cGRm"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "find", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]
    look = {"name": "look", "description": "Look up", "parameters": {"type": "object"}, "strict": True}
    salt = asked.pop("cache_salt")
    assert salt
    assert asked == {
        "model": "m",
        "tools": [{"type": "function", "function": look}, {"type": "function", "function": {"name": "find"}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "max_tokens": 99,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
        },
        "reasoning_effort": "low",
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"b": 1},
        "return_cached_tokens_details": True,
    }


async def test_b013_thought_text_and_two_calls_are_the_same_streamed_and_whole(
    engine: ScriptedEngine, gpt: AsyncOpenAI
) -> None:
    engine.script = Script(body=whole(THOUGHT_AND_TWO_CALLS_WHOLE, "tool_calls", prompt=20, output=9, cached=16))
    plain = strictly(await gpt.responses.create(model="m", input="hi", tools=TOOLS))
    engine.script = Script(events=streamed(THOUGHT_AND_TWO_CALLS, "tool_calls", prompt=20, cached=16))
    async with gpt.responses.stream(model="m", input="hi", tools=TOOLS) as events:
        await events.until_done()
        built = await events.get_final_response()
    seen = [event async for event in await gpt.responses.create(model="m", input="hi", tools=TOOLS, stream=True)]
    for event in seen:
        strictly(event)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    last = seen[-1]
    assert last.type == "response.completed"
    assert [item.type for item in plain.output] == ["reasoning", "message", "function_call", "function_call"]

    def told(output: list[Any]) -> list[Json]:
        return [{k: v for k, v in item.to_dict().items() if k not in ("id", "parsed_arguments")} for item in output]

    assert told(last.response.output) == told(plain.output)
    assert [item.type for item in built.output] == [item.type for item in plain.output]
    assert [i.arguments for i in built.output if i.type == "function_call"] == ['{"x": 1}', '{"y": "Grüße"}']
    assert last.response.usage == plain.usage
    items = [event for event in seen if event.type.startswith("response.output_item")]
    assert [(e.type.rsplit(".", 1)[1], e.output_index) for e in items] == [
        (kind, index) for index in range(4) for kind in ("added", "done")
    ]
    kinds = [event.type for event in seen]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    for kind, count in (
        ("response.content_part.added", 2),
        ("response.content_part.done", 2),
        ("response.reasoning_text.delta", 2),
        ("response.reasoning_text.done", 1),
        ("response.output_text.delta", 2),
        ("response.output_text.done", 1),
        ("response.function_call_arguments.done", 2),
    ):
        assert kinds.count(kind) == count, kind


async def test_a_limit_makes_a_response_incomplete_and_a_refusal_is_one(
    engine: ScriptedEngine, gpt: AsyncOpenAI
) -> None:
    engine.script = Script(events=streamed([{"content": "x"}], "length"))
    seen = [event async for event in await gpt.responses.create(model="m", input="hi", stream=True)]
    last = strictly(seen[-1])
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert (last.response.status, last.response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    engine.script = Script(body=whole({"content": None, "refusal": "no"}))
    response = strictly(await gpt.responses.create(model="m", input="hi"))
    assert response.output[0].type == "message"
    assert response.output[0].content[0].to_dict() == {"type": "refusal", "refusal": "no"}


async def test_a_choice_among_no_tools_is_none(engine: ScriptedEngine, gpt: AsyncOpenAI) -> None:
    """Some clients always send one; vLLM and OpenAI refuse a choice without tools."""
    response = await gpt.responses.create(
        model="m", input="hi", tools=[], tool_choice="auto", parallel_tool_calls=False
    )
    assert engine.asked[0].json.keys().isdisjoint({"tools", "tool_choice", "parallel_tool_calls"})
    assert response.tool_choice == "auto"
    await gpt.responses.create(model="m", input="hi", tool_choice="required")
    assert engine.asked[1].json["tool_choice"] == "required"  # which cannot be, as the engine will say


async def test_logprobs_come_through(engine: ScriptedEngine, gpt: AsyncOpenAI) -> None:
    logprobs = {"content": [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}]}
    engine.script = Script(body=whole({"content": "x"}, logprobs=logprobs))
    response = strictly(
        await gpt.responses.create(model="m", input="hi", include=["message.output_text.logprobs"], top_logprobs=0)
    )
    assert (engine.asked[0].json["logprobs"], engine.asked[0].json["top_logprobs"]) == (True, 0)
    part = response.output[0].content[0]  # type: ignore[union-attr,index]
    assert [item.to_dict() for item in part.logprobs] == logprobs["content"]  # type: ignore[union-attr]


async def test_r02_a_stream_that_breaks_ends_with_an_error_and_a_failed_response(
    gateway: Client, engine: ScriptedEngine, gpt: AsyncOpenAI
) -> None:
    engine.script = Script(events=stream(["a", "b"])[:3], end="reset")
    raw = await gpt.responses.with_raw_response.create(model="m", input="hi", stream=True)
    seen = [event async for event in raw.parse()]
    assert [event.type for event in seen[-2:]] == ["error", "response.failed"]
    for event in seen:
        strictly(event)
    record = await gateway.record(raw.headers["x-request-id"])
    assert (record.outcome, record.error) == (Outcome.TRUNCATED, "stream_truncated")


async def test_a_chain_is_continued_by_its_last_response(
    gateway: Client, engine: ScriptedEngine, gpt: AsyncOpenAI
) -> None:
    engine.script = Script(body=whole(THOUGHT_AND_TWO_CALLS_WHOLE, "tool_calls"))
    first = await gpt.responses.create(model="m", input="hi", instructions="Be kind.", tools=TOOLS)
    engine.script = Script(events=streamed([{"content": "done"}]))
    results: list[Any] = [
        {"type": "function_call_output", "call_id": name, "output": name} for name in ("call_a", "call_b")
    ]
    async with gpt.responses.stream(model="m", input=results, previous_response_id=first.id) as events:
        second = await events.get_final_response()
    engine.script = Script(body=answer("bye"))
    third = await gpt.responses.create(model="m", input="thanks", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    calls = THOUGHT_AND_TWO_CALLS_WHOLE["tool_calls"]
    thought = {"content": "I look both up. 世界🌍", "reasoning_content": "Two look-ups."}
    assert engine.asked[2].json["messages"] == [  # instructions are not carried over
        {"role": "user", "content": "hi"},
        {"role": "assistant", **thought, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_a", "content": "call_a"},
        {"role": "tool", "tool_call_id": "call_b", "content": "call_b"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    record = await gateway.record(str(third._request_id))
    first_record = await gateway.record(str(first._request_id))
    assert record.link is not None
    assert first_record.link is not None
    assert (record.link.run_id, record.link.step) == (first_record.link.run_id, 3)
    assert record.link.method == "previous_response_id"


async def test_kept_responses_are_their_tenants_and_can_be_deleted(
    gateway: Client, engine: ScriptedEngine, gpt: AsyncOpenAI
) -> None:
    made = await gpt.responses.create(model="m", input="hi")
    kept = strictly(await gpt.responses.retrieve(made.id))
    assert kept.to_dict() == made.to_dict()
    listed = await gpt.responses.input_items.list(made.id)
    assert [item.content for item in listed.data] == ["hi"]  # type: ignore[union-attr]
    async with openai_client(gateway.url, key="sk-b") as other:
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await other.responses.create(model="m", input="go on", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError):
        await gpt.responses.cancel(made.id)
    await gpt.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await gpt.responses.retrieve(made.id)
    unkept = await gpt.responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await gpt.responses.retrieve(unkept.id)


async def test_kept_items_come_in_pages_the_newest_first(engine: ScriptedEngine, gpt: AsyncOpenAI) -> None:
    words: list[Any] = [{"role": "user", "content": f"word {n}"} for n in range(25)]
    made = await gpt.responses.create(model="m", input=words)
    listed = gpt.responses.input_items.list
    newest = await listed(made.id)
    assert [item.content for item in newest.data] == [f"word {n}" for n in range(24, 4, -1)]  # type: ignore[union-attr]
    assert [item.content async for item in listed(made.id)] == [  # type: ignore[union-attr]
        f"word {n}" for n in range(24, -1, -1)
    ]
    oldest = await listed(made.id, order="asc", limit=2)
    rest = await listed(made.id, order="asc", limit=100, after=str(oldest.data[-1].id))
    assert [item.content for item in [*oldest.data, *rest.data]] == [  # type: ignore[union-attr]
        f"word {n}" for n in range(25)
    ]
    wrong: list[Any] = [{"limit": 0}, {"limit": 101}, {"order": "any"}, {"after": "nothing"}]
    for query in wrong:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
            await listed(made.id, **query)
        assert caught.value.param in query


async def test_events_of_a_kept_response_cannot_be_had_again(engine: ScriptedEngine, gpt: AsyncOpenAI) -> None:
    made = await gpt.responses.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.responses.retrieve(made.id, stream=True)
    assert caught.value.param == "stream"


async def test_functions_in_a_namespace_are_called_by_their_own_names(engine: ScriptedEngine, gpt: AsyncOpenAI) -> None:
    inner = {"type": "function", "name": "look_up", "description": "Find one", "parameters": {"type": "object"}}
    tools: list[Any] = [*TOOLS, {"type": "namespace", "name": "crm", "description": "Customers", "tools": [inner]}]
    choice: Any = {"type": "function", "name": "look_up", "namespace": "crm"}
    piece = call_piece(0, id="call_a", name="crm__look_up", arguments="{}")
    engine.script = Script(body=whole({"tool_calls": piece["tool_calls"]}, "tool_calls"))
    plain = strictly(await gpt.responses.create(model="m", input="hi", tools=tools, tool_choice=choice))
    engine.script = Script(events=streamed([piece], "tool_calls"))
    seen = [event async for event in await gpt.responses.create(model="m", input="hi", tools=tools, stream=True)]
    for event in seen:
        strictly(event)
    asked = engine.asked[0].json
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["look", "find", "crm__look_up"]
    assert asked["tool_choice"]["function"]["name"] == "crm__look_up"
    (call,) = plain.output
    assert call.type == "function_call"
    assert (call.name, call.namespace, call.call_id) == ("look_up", "crm", "call_a")
    items = [event.item for event in seen if event.type == "response.output_item.done"]
    assert [(item.name, item.namespace) for item in items] == [("look_up", "crm")]  # type: ignore[union-attr]
    assert [e.name for e in seen if e.type == "response.function_call_arguments.done"] == ["look_up"]
    engine.script = Script(body=answer("done"))
    result: list[Any] = [{"type": "function_call_output", "call_id": "call_a", "output": "1"}]
    await gpt.responses.create(model="m", input=result, previous_response_id=plain.id, tools=tools)
    (quoted,) = engine.asked[-1].json["messages"][1]["tool_calls"]
    assert quoted["function"]["name"] == "crm__look_up"


PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (('{"inp', 'ut": "*** Begin\\n\\"x\\""}'), '*** Begin\n"x"'),
        (('"as a string"',), "as a string"),
        (("no JSON",), "no JSON"),
        (('{"other": 1}',), '{"other": 1}'),
    ],
)
async def test_a_custom_tool_is_a_function_of_one_string_to_the_engine(
    engine: ScriptedEngine, gpt: AsyncOpenAI, arguments: tuple[str, ...], given: str
) -> None:
    tools: list[Any] = [*TOOLS, PATCH]
    first = call_piece(0, id="call_a", name="apply_patch")
    call = call_piece(0, id="call_a", name="apply_patch", arguments="".join(arguments))
    engine.script = Script(body=whole({"tool_calls": call["tool_calls"]}, "tool_calls"))
    choice: Any = {"type": "custom", "name": "apply_patch"}
    plain = strictly(await gpt.responses.create(model="m", input="hi", tools=tools, tool_choice=choice))
    pieces = [call_piece(0, arguments=piece) for piece in arguments]
    engine.script = Script(events=streamed([first, *pieces, {"content": "so"}], "tool_calls"))
    seen = [event async for event in await gpt.responses.create(model="m", input="hi", tools=tools, stream=True)]
    for event in seen:
        strictly(event)
    asked = engine.asked[0].json
    function = asked["tools"][-1]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Edit files")
    assert "lark grammar:\nstart: /.+/" in function["description"]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    ended = [event.item for event in seen if event.type == "response.output_item.done"]
    for item in (plain.output[0], ended[0]):
        assert item.type == "custom_tool_call"
        assert (item.name, item.call_id, item.input) == ("apply_patch", "call_a", given)
    assert [event.delta for event in seen if event.type == "response.custom_tool_call_input.delta"] == [given]
    assert [event.input for event in seen if event.type == "response.custom_tool_call_input.done"] == [given]
    assert not any(event.type.startswith("response.function_call") for event in seen)
    engine.script = Script(body=answer("done"))
    result: list[Any] = [{"type": "custom_tool_call_output", "call_id": "call_a", "output": "ok"}]
    await gpt.responses.create(model="m", input=result, previous_response_id=plain.id, tools=tools)
    quoted, told = engine.asked[-1].json["messages"][1:]
    assert json.loads(quoted["tool_calls"][0]["function"]["arguments"]) == {"input": given}
    assert told == {"role": "tool", "tool_call_id": "call_a", "content": "ok"}


async def test_tools_that_an_item_gives_are_the_requests_and_are_called_by_their_own_names(
    engine: ScriptedEngine, gpt: AsyncOpenAI
) -> None:
    def giving(*tools: Any) -> Any:
        return {"type": "additional_tools", "role": "developer", "tools": list(tools)}

    wait = {"type": "function", "name": "wait", "description": "old", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "functions", "description": "", "tools": [{**PATCH, "name": "exec"}, wait]}
    later = {**space, "tools": [{**wait, "description": "new"}]}
    given: list[Any] = [giving(space), {"role": "user", "content": "hi"}]
    piece = call_piece(0, id="call_a", name="functions__exec", arguments='{"input": "text(1)"}')
    engine.script = Script(body=whole({"tool_calls": piece["tool_calls"]}, "tool_calls"))
    made = strictly(await gpt.responses.create(model="m", input=given, tools=TOOLS))
    (call,) = made.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.namespace, call.input) == ("exec", "functions", "text(1)")
    result: Any = {"type": "custom_tool_call_output", "call_id": "call_a", "output": "1"}
    engine.script = Script(events=streamed([piece], "tool_calls"))
    asked: Any = {"input": [giving(later), result], "previous_response_id": made.id, "tools": TOOLS}
    seen = [event async for event in await gpt.responses.create(model="m", stream=True, **asked)]
    assert [e.input for e in seen if e.type == "response.custom_tool_call_input.done"] == ["text(1)"]
    names = ["look", "find", "functions__exec", "functions__wait"]
    for request, told in zip(engine.asked, ("old", "new"), strict=True):
        functions = [tool["function"] for tool in request.json["tools"]]
        assert [function["name"] for function in functions] == names
        assert functions[-1]["description"] == told
    assert [message["role"] for message in engine.asked[1].json["messages"]] == ["user", "assistant", "tool"]
    quoted = engine.asked[1].json["messages"][1]["tool_calls"][0]["function"]
    assert quoted == {"name": "functions__exec", "arguments": '{"input": "text(1)"}'}
    wrong: list[Any] = [{"role": "user", "content": "hi"}, giving({"type": "web_search"})]
    with pytest.raises(openai.BadRequestError) as refused:
        await gpt.responses.create(model="m", input=wrong)
    assert refused.value.param == "input[1].tools[0].type"


async def test_items_can_be_referred_to(engine: ScriptedEngine, gpt: AsyncOpenAI) -> None:
    engine.script = Script(body=whole(THOUGHT_AND_TWO_CALLS_WHOLE, "tool_calls"))
    made = await gpt.responses.create(model="m", input="hi", tools=TOOLS)
    engine.script = Script(body=answer("done"))
    own: list[Any] = [{"role": "user", "content": "hi"}]
    named: list[Any] = [{"type": "item_reference", "id": item.id} for item in made.output]
    results: list[Any] = [{"type": "function_call_output", "call_id": c, "output": "1"} for c in ("call_a", "call_b")]
    await gpt.responses.create(model="m", input=own + named + results)
    assert [m["role"] for m in engine.asked[1].json["messages"]] == ["user", "assistant", "tool", "tool"]
    assert engine.asked[1].json["messages"][1]["tool_calls"] == THOUGHT_AND_TWO_CALLS_WHOLE["tool_calls"]
    with pytest.raises(openai.BadRequestError, match="nowhere"):
        await gpt.responses.create(model="m", input=[{"type": "item_reference", "id": "nowhere"}])


async def test_what_is_referred_to_counts_as_often_as_it_is_named(
    engine: ScriptedEngine, gpt: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_REFERRED_BYTES", 5000)
    engine.script = Script(body=answer("w" * 1000))
    made = await gpt.responses.create(model="m", input="hi")
    named: list[Any] = [{"type": "item_reference", "id": made.output[0].id}]
    await gpt.responses.create(model="m", input=named * 4)
    for times, status in ((5, 413), (protocol.MAX_REFERENCES + 1, 400)):
        with pytest.raises(openai.APIStatusError) as refused:
            await gpt.responses.create(model="m", input=named * times)
        assert refused.value.status_code == status
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"input": 3}, "input"),
        ({"input": [{"role": "emperor", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_translated_is_refused_by_name(
    gateway: Client, engine: ScriptedEngine, change: Json, where: str
) -> None:
    ask = {"model": "m", "input": "hi", **change}
    headers = {"authorization": "Bearer sk-a"}
    async with gateway.session.post(f"{gateway.url}/v1/responses", json=ask, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert where in (error["param"] or "")
    assert engine.asked == []


@pytest.mark.parametrize("streams", [False, True])
async def test_an_engines_refusal_names_what_the_client_sent(
    gateway: Client, engine: ScriptedEngine, streams: bool
) -> None:
    refusal = {"message": "messages[0].content[0]: a part of type 'file'", "param": "messages", "code": "bad_part"}
    engine.script = Script(status=400, body={"error": refusal})
    ask, headers = {"model": "m", "input": "hi", "stream": streams}, {"authorization": "Bearer sk-a"}
    async with gateway.session.post(f"{gateway.url}/v1/responses", json=ask, headers=headers) as response:
        error = (await response.json())["error"]
    assert (error["message"], error["param"]) == ("input: a part of type 'file'", "input")


def _native(response: Json, text: str) -> list[bytes]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {
            "type": "response.output_text.delta",
            "item_id": "msg_n",
            "output_index": 0,
            "content_index": 0,
            "delta": text,
        },
        {"type": "response.completed", "response": response},
    ]
    return [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()
        for number, event in enumerate(events)
    ]


async def test_bytes_of_an_engine_that_speaks_responses_pass_and_the_gateway_keeps_the_chain(tmp_path: Path) -> None:
    said = {"type": "output_text", "text": "hi", "annotations": []}
    message = {"type": "message", "id": "msg_n", "role": "assistant", "status": "completed", "content": [said]}
    usage = {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 11,
    }
    response = {"id": "resp_n", "object": "response", "model": "real", "status": "completed", "output": [message]}
    async with ScriptedEngine() as engine:
        instances = [{"id": "n", "url": engine.url, "adapter": "openai", "speaks": ["responses"]}]
        async with gateway_for([engine], tmp_path, instances=instances) as gateway:
            url = f"{gateway.url}/v1/responses"
            events = _native({**response, "usage": usage}, "hi")
            engine.script = Script(events=events)
            body = b'{"model":"m", "input":"\\u00e9","stream":true,"tools":[{"type":"web_search"}]}'
            async with gateway.session.post(url, data=body) as reply:
                assert await reply.read() == b"".join(events)
            assert (engine.asked[0].path, engine.asked[0].body) == ("/v1/responses", body)
            async with gateway.session.get(f"{url}/resp_n") as reply:
                assert (await reply.json())["output"] == [message]
            engine.script = Script(body={**response, "id": "resp_o", "usage": usage})
            body = b'{"x":1.50,"previous_response_id":"resp_n","model":"m","input":[{"role":"user","content":"more"}]}'
            async with gateway.session.post(url, data=body) as reply:
                assert reply.status == 200
            asked = engine.asked[1]
            assert asked.body.startswith(b'{"x":1.50,"model":"m","input":[')
            assert asked.json["input"][1] == message
            assert [item["content"] for item in asked.json["input"][::2]] == ["é", "more"]
            first, second = await gateway.records(2)
    assert (first.usage.fresh_tokens, first.usage.hit_tokens, first.usage.output_tokens) == (5, 4, 2)
    assert first.link is not None
    assert second.link is not None
    assert first.link.run_id == second.link.run_id


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch"}, "apply_patch"),
        ({"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}}, "local_shell"),
        ({"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}}, "tool_search"),
    ],
)
async def test_calls_of_any_tool_that_the_client_runs_are_told_and_make_one_run(
    tmp_path: Path, call: Json, name: str
) -> None:
    hosted = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    }
    made = {**call, "id": "c_1", "call_id": "call_1", "status": "completed"}
    usage = {"input_tokens": 9, "output_tokens": 2, "total_tokens": 11}
    response = {"id": "resp_1", "object": "response", "model": "m", "status": "completed", "usage": usage}
    async with ScriptedEngine() as engine:
        instances = [{"id": "n", "url": engine.url, "adapter": "openai", "speaks": ["responses"]}]
        async with gateway_for([engine], tmp_path, instances=instances) as gateway:
            for items in ([{"role": "user", "content": "hi"}],
                          [{"role": "user", "content": "as it was told anew"}, made,
                           {"type": f"{call['type']}_output", "call_id": "call_1", "output": "ok"}]):  # fmt: skip
                engine.script = Script(body={**response, "output": [hosted, made]})
                asked = {"model": "m", "input": items, "store": False}
                async with gateway.session.post(f"{gateway.url}/v1/responses", json=asked) as reply:
                    assert reply.status == 200
            first, second = await gateway.records(2)
    assert [called.name for called in first.tool_calls] == [name]
    assert first.link is not None
    assert second.link is not None
    assert (second.link.run_id, second.link.step) == (first.link.run_id, 2)
