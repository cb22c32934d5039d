"""Streams that go on from their text, on engines that know nothing of each other: what those are asked, what is seen.

The engines are scripted: what matters is on the wire, and a real one never dies at the very place that is wanted.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.prompt import PromptEncoder
from tests.gateways import Client, gateway_for
from tests.scripted_engine import DONE, Asked, Script, ScriptedEngine, chunk, event, stream, usage, usage_chunk
from tracing.record import HitSource, Outcome, UsageSource

Json = dict[str, Any]
ROLE = event(chunk({"role": "assistant", "content": ""}))
MESSAGES = [{"role": "user", "content": "hi"}]


def words(*said: str, name: str = "content") -> list[bytes]:
    return [event(chunk({name: word})) for word in said]


def dies(*events: bytes) -> Script:
    return Script(events=[ROLE, *events], end="reset")


def call(index: int = 0, **function: str) -> bytes:
    return event(chunk({"tool_calls": [{"index": index, "id": "call_1", "type": "function", "function": function}]}))


class Fleet:
    """Three engines that answer the n-th request with the n-th script, whoever is asked."""

    def __init__(self, engines: list[ScriptedEngine], client: Client) -> None:
        self.client, self.asked = client, list[Asked]()
        self._scripts: list[Script] = []
        for engine in engines:
            engine.script_for = self._next

    def _next(self, asked: Asked) -> Script:
        self.asked.append(asked)
        return self._scripts.pop(0)

    async def ask(self, scripts: list[Script], path: str = "/v1/chat/completions", **body: Any) -> list[Json]:
        """Return the events that the client got; the end mark as an empty one."""
        self.asked.clear()
        self._scripts = list(scripts)
        body = {"model": "m", "stream": True, **body}
        async with self.client.session.post(f"{self.client.url}{path}", json=body) as response:
            assert response.status == 200
            shown = (await response.read()).decode()
        lines = [line[6:] for line in shown.splitlines() if line.startswith("data: ")]
        return [{} if line == "[DONE]" else json.loads(line) for line in lines]

    async def chat(self, scripts: list[Script], **body: Any) -> list[Json]:
        return await self.ask(scripts, **{"messages": MESSAGES, **body})


@pytest_asyncio.fixture(params=["sglang", "vllm", "llamacpp"])
async def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def fleet(kind: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with ScriptedEngine() as one, ScriptedEngine() as two, ScriptedEngine() as three:
        engines = [one, two, three]
        instances = [
            {"id": f"e{n}", "url": engine.url, "adapter": kind, "models": ["m"]} for n, engine in enumerate(engines)
        ]
        async with gateway_for(engines, tmp_path, instances=instances) as client:
            yield Fleet(engines, client)


def text_of(chunks: list[Json], name: str = "content") -> str:
    return "".join(c["choices"][0]["delta"].get(name, "") for c in chunks if c.get("choices"))


def error_of(chunks: list[Json]) -> bool:
    return any("error" in c or c.get("type") in ("error", "response.failed") for c in chunks)


async def test_plain_text_goes_on_through_two_deaths(fleet: Fleet, kind: str) -> None:
    """What is over the cut: characters of four bytes, text that spells an event's end, white space."""
    scripts = [dies(*words("Grüße 🏔", "data: [DONE]\n\n")), dies(*words("\n\n", "🏔 an")),
               Script(events=stream([" alle", "."], 30, 20))]  # fmt: skip
    chunks = await fleet.chat(scripts, stream_options={"include_usage": True}, max_tokens=50)
    assert text_of(chunks) == "Grüße 🏔data: [DONE]\n\n🏔 an alle."
    assert chunks[-1] == {}
    first, second, third = (asked.json for asked in fleet.asked)
    assert first["messages"] == MESSAGES
    assert second["messages"] == [*MESSAGES, {"role": "assistant", "content": "Grüße 🏔data: [DONE]"}]
    assert third["messages"] == [*MESSAGES, {"role": "assistant", "content": "Grüße 🏔data: [DONE]\n\n🏔 an"}]
    assert [asked.get("continue_final_message") for asked in (second, third)] == [
        None if kind == "llamacpp" else True
    ] * 2
    assert [asked["max_tokens"] for asked in (first, second, third)] == [50, 48, 47]
    (record,) = await fleet.client.records(1)
    assert record.outcome is Outcome.OK
    assert [attempt.delivered_pieces for attempt in record.attempts] == [0, 2, 3]
    assert record.usage.prompt_tokens + record.usage.output_tokens == 30 + 2
    assert record.usage.output_tokens == 3 + 2
    assert record.usage.hit_tokens <= record.usage.prompt_tokens
    assert record.finish_reason == "stop"


async def test_hits_are_those_of_the_engine_that_began(fleet: Fleet) -> None:
    """The engine that goes on has the prompt in its cache since the gateway had it computed twice."""
    usage_too = {"stream_options": {"include_usage": True}}
    told = event(chunk({"content": "two"}, usage=usage(18, 2, 4)))  # counts in every chunk, which some engines send
    chunks = await fleet.chat([dies(*words("one "), told), Script(events=stream([" three"], 20, 18))], **usage_too)
    shown = next(c["usage"] for c in reversed(chunks) if c.get("usage"))
    assert shown["prompt_tokens_details"]["cached_tokens"] == 4
    (record,) = await fleet.client.records(1)
    assert record.usage.source is UsageSource.ENGINE
    assert (record.usage.hit_tokens, record.usage.hit_source) == (4, HitSource.TOTAL)
    assert (record.usage.prompt_tokens, record.usage.output_tokens) == (18, 3)


async def test_hits_that_no_engine_told_are_unknown(fleet: Fleet) -> None:
    scripts = [dies(*words("one ", "two")), Script(events=stream([" three"], 20, 18))]
    await fleet.chat(scripts)
    (record,) = await fleet.client.records(1)
    assert (record.usage.hit_tokens, record.usage.hit_source) == (0, HitSource.UNKNOWN)
    assert record.usage.prompt_tokens + record.usage.output_tokens == 21
    assert record.decision is not None
    assert record.decision.instance == record.attempts[0].instance


async def test_counts_of_an_engine_that_died_are_not_those_of_the_whole(fleet: Fleet) -> None:
    told = event(chunk({"content": "one "}, usage=usage(18, 1, 4)))
    await fleet.chat([dies(told), dies(*words("two ")), dies(*words("three"))])
    (record,) = await fleet.client.records(1)
    assert record.outcome is Outcome.TRUNCATED
    assert record.usage.source is not UsageSource.ENGINE


async def test_completions_go_on_behind_their_prompt(fleet: Fleet) -> None:
    def piece(text: str, finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish}
        return event({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})

    end = [piece("three", "length"), event(usage_chunk(12, 1)), DONE]
    scripts = [Script(events=[piece("one "), piece("two ")], end="reset"), Script(events=end)]
    chunks = await fleet.ask(scripts, "/v1/completions", prompt="count: ", max_tokens=3)
    assert "".join(c["choices"][0]["text"] for c in chunks if c.get("choices")) == "one two three"
    assert fleet.asked[1].json["prompt"] == "count: one two "
    assert fleet.asked[1].json["max_tokens"] == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks if c.get("choices")][-1] == "length"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_protocols_go_on_in_the_block_that_is_open(fleet: Fleet, path: str) -> None:
    own: Json = {"messages": MESSAGES, "max_tokens": 50} if path == "/v1/messages" else {"input": "hi"}
    scripts = [dies(*words("one ", "two")), Script(events=stream([" three"], 14, 8))]
    chunks = await fleet.ask(scripts, path, **own)
    kinds = [c["type"] for c in chunks]
    if path == "/v1/messages":
        assert [
            kinds.count(k) for k in ("message_start", "content_block_start", "content_block_stop", "message_stop")
        ] == [1] * 4
        assert "".join(c["delta"]["text"] for c in chunks if c["type"] == "content_block_delta") == "one two three"
        (end,) = [c for c in chunks if c["type"] == "message_delta"]
        assert end["delta"]["stop_reason"] == "end_turn"
        assert end["usage"]["output_tokens"] == 3
    else:
        assert [c["sequence_number"] for c in chunks] == list(range(len(chunks)))
        assert kinds.count("response.output_item.added") == kinds.count("response.completed") == 1
        assert chunks[-1]["response"]["output"][0]["content"][0]["text"] == "one two three"
        assert chunks[-1]["response"]["usage"]["output_tokens"] == 3


async def test_reasoning_that_is_over_goes_on_as_text(fleet: Fleet) -> None:
    thought = [*words("so ", "so", name="reasoning_content"), *words("It is")]
    after = [ROLE, *words(" four", name="reasoning_content"), *stream(["."], 20)[1:]]  # a parser that begins inside
    chunks = await fleet.chat([dies(*thought), Script(events=after)])
    assert (text_of(chunks, "reasoning_content"), text_of(chunks)) == ("so so", "It is four.")
    last = fleet.asked[1].json["messages"][-1]
    assert last == {"role": "assistant", "content": "It is", "reasoning_content": "so so"}


Arts = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
HONEST: dict[str, tuple[Arts, Callable[[], list[bytes]]]] = {
    "several choices": ({"n": 2}, lambda: words("one")),
    "log-probabilities": ({"logprobs": True}, lambda: words("one")),
    "a schema": ({"response_format": {"type": "json_object"}}, lambda: words("{")),
    "a call that has begun": ({"tools": TOOLS}, lambda: [call(name="f", arguments='{"a":')]),
    "a call that must come": ({"tools": TOOLS, "tool_choice": "required"}, lambda: words("one")),
    "a regular expression": ({"regex": "[ab]*"}, lambda: words("a")),
    "a limit that is reached": ({"max_tokens": 1}, lambda: words("one")),
    "a second choice": ({}, lambda: [event({"choices": [{"index": 1, "delta": {"content": "x"}}]})]),
    "reasoning that goes on": ({}, lambda: words("so", name="reasoning_content")),
}


@pytest.mark.parametrize("name", HONEST)
async def test_r02_what_cannot_go_on_rightly_ends_with_an_error(fleet: Fleet, name: str) -> None:
    body, events = HONEST[name]
    chunks = await fleet.chat([dies(*events())], **body)
    assert error_of(chunks)
    assert chunks[-1] == {}
    assert len(fleet.asked) == 1
    assert not [c for c in chunks if c.get("choices") and c["choices"][0].get("finish_reason")]
    (record,) = await fleet.client.records(1)
    assert record.outcome is Outcome.TRUNCATED
    assert record.usage.source is not UsageSource.ENGINE


async def test_a_free_choice_of_tools_goes_on_while_no_call_has_begun(fleet: Fleet) -> None:
    end = [call(name="f", arguments="{}"), event(chunk({}, finish="tool_calls")), event(usage_chunk(20, 8)), DONE]
    chunks = await fleet.chat([dies(*words("I look")), Script(events=[ROLE, *end])], tools=TOOLS)
    assert text_of(chunks) == "I look"
    (record,) = await fleet.client.records(1)
    assert [made.name for made in record.tool_calls] == ["f"]
    assert record.finish_reason == "tool_calls"


async def test_a_stop_text_over_the_cut_ends_the_answer(fleet: Fleet) -> None:
    chunks = await fleet.chat([dies(*words("say ST")), Script(events=stream(["O", "P", " and on"]))], stop=["STOP"])
    assert text_of(chunks) == "say ST"
    assert [c["choices"][0]["finish_reason"] for c in chunks if c.get("choices")][-1] == "stop"
    (record,) = await fleet.client.records(1)
    assert record.outcome is Outcome.OK
    assert record.usage.source is not UsageSource.ENGINE


async def test_when_nobody_can_go_on_the_client_is_told_once(fleet: Fleet) -> None:
    chunks = await fleet.chat([dies(*words("a ")), dies(*words("b ")), dies(*words("c"))])
    assert text_of(chunks) == "a b c"
    assert len([c for c in chunks if "error" in c]) == 1
    (record,) = await fleet.client.records(1)
    assert len(record.attempts) == 3
    assert record.outcome is Outcome.TRUNCATED


async def test_a_refusal_to_go_on_is_the_first_engines_break(fleet: Fleet) -> None:
    """An engine that cannot continue says 400: that is not the client's mistake, and nothing that it should read."""
    no = Script(status=400, body={"error": {"message": "no prefill here", "type": "invalid_request_error"}})
    chunks = await fleet.chat([dies(*words("one")), no, no])
    assert error_of(chunks)
    assert "prefill" not in json.dumps(chunks)


async def test_the_end_that_was_seen_counts_though_the_mark_was_not(fleet: Fleet) -> None:
    chunks = await fleet.chat([dies(*words("one"), event(chunk({}, finish="stop")))])
    assert not error_of(chunks)
    assert chunks[-1] == {}
    (record,) = await fleet.client.records(1)
    assert (record.outcome, len(record.attempts)) == (Outcome.OK, 1)


@pytest.mark.model
async def test_an_engine_that_reads_ids_gets_prompt_and_answer_as_ids(tmp_path: Path, encoder: PromptEncoder) -> None:
    """With the tokenizer known here, nothing hangs on what a template makes of a last message."""
    said, rest = "Zürich 🏔 is", " big."
    prompt = encoder.encode_chat(MESSAGES)
    ids = encoder.tokenizer.encode(said, add_special_tokens=False).ids
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        instances = [{"id": f"e{n}", "url": e.url, "adapter": "sglang"} for n, e in enumerate((one, two))]
        models = [{"name": "m", "tokenizer": "default"}]
        async with gateway_for([one, two], tmp_path, instances=instances, models=models, ready_limit_s=60) as client:
            fleet = Fleet([one, two], client)
            counted = Script(events=stream([rest], len(prompt) + len(ids), 4))
            chunks = await fleet.chat([dies(*words("Zürich 🏔", " is")), counted], max_tokens=50)
            assert text_of(chunks) == said + rest
            asked = fleet.asked[1].json
            assert asked["input_ids"] == [*prompt, *ids]
            assert asked["messages"] == MESSAGES
            assert "continue_final_message" not in asked
            assert asked["max_tokens"] == 50 - len(ids)
            (record,) = await client.records(1)
            assert record.usage.prompt_tokens == len(prompt) == record.gateway_prompt_tokens
            assert record.usage.output_tokens == len(ids) + 1
            spelled = await fleet.chat([dies(*words("the token <|im_end|> ends"))], max_tokens=50)
            assert error_of(spelled)  # as ids of a text it would be the token itself
            told = event(chunk({"content": "one "}, usage=usage(len(prompt), 1, 4)))
            await fleet.chat([dies(told), dies(*words("two"))], max_tokens=50)
            lost = (await client.records(3))[-1]
            assert (lost.usage.source, lost.usage.hit_tokens) == (UsageSource.RECOVERED, 4)
            assert lost.usage.prompt_tokens == len(prompt)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(ensure_default_model())
