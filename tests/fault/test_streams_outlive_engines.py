"""Real engines die under streams, and the streams go on as if nothing had been.

The engines are embedded ones with a random model, whose answers are noise: any token, characters in pieces, stop texts.
Greedy answers must be, to the last token, what an undisturbed engine says.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.protocols.sse import EventCutter, data_of
from tests.gateways import Client, gateway_for
from tests.mortal_engines import MortalEngine, mortal_engines, small_model
from tracing.record import AttemptRole, HitSource, Outcome, RequestRecord

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

Json = dict[str, Any]
MODEL = "noise"
WORDS = ["Grüße", "an", "agent", "that", "writes", "code", "and", "reads", "files", "all", "day"]
SCHEMA = {"type": "object", "properties": {"città": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}},
          "required": ["città", "n"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}


def asked(number: int) -> tuple[str, Json]:
    """Return a path and a body; every kind of stream and of grammar comes up."""
    text = f"{number}: " + " ".join(WORDS[(number + n) % len(WORDS)] for n in range(12))
    messages = [{"role": "user", "content": text}]
    shared: Json = {"model": MODEL, "stream": True, "temperature": 0}
    usage = {"stream_options": {"include_usage": True}}
    chat: Json = {**shared, **usage, "messages": messages, "max_tokens": 48, "return_output_ids_in_sglext": True}
    kinds: list[tuple[str, Json]] = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", {**shared, **usage, "prompt": text, "max_tokens": 48, "stop": ["qqq", "the"]}),
        ("/v1/messages", {**shared, "messages": messages, "max_tokens": 48}),
        ("/v1/responses", {**shared, "input": text, "max_output_tokens": 48}),
        ("/v1/chat/completions", {**chat, "response_format": _format(SCHEMA)}),
        ("/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/messages", {**shared, "messages": messages, "max_tokens": 48, "tool_choice": {"type": "any"},
                          "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]}),
        ("/v1/chat/completions", {**chat, "temperature": 0.8, "seed": 11}),
    ]  # fmt: skip
    return kinds[number % len(kinds)]


def _format(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}


class Stream:
    """One client's stream, read to its end."""

    def __init__(self, number: int) -> None:
        self.path, self.body = asked(number)
        self.chunks: list[Json] = []
        self.instance, self.request_id = "", ""
        self.begun = asyncio.Event()

    async def run(self, client: Client) -> Stream:
        cutter = EventCutter(1 << 20)
        async with client.session.post(f"{client.url}{self.path}", json=self.body) as response:
            assert response.status == 200, await response.text()
            self.instance = response.headers["x-keepwarm-instance"]
            self.request_id = response.headers["x-keepwarm-request-id"]
            async for data in response.content.iter_any():
                for event in cutter.feed(data):
                    told = data_of(event)
                    if told is not None and told != b"[DONE]":
                        self.chunks.append(json.loads(told))
                        if self.said():
                            self.begun.set()
        return self

    def said(self) -> object:
        """Return what was answered, without ids that differ each time."""
        if self.path == "/v1/chat/completions":
            choices = [c["choices"][0] for c in self.chunks if c.get("choices")]
            text = "".join(c["delta"].get("content") or "" for c in choices)
            calls = [piece for c in choices for piece in c["delta"].get("tool_calls", ())]
            arguments = "".join(piece["function"].get("arguments", "") for piece in calls)
            names = [name for piece in calls if (name := piece["function"].get("name"))]
            return (text, names, arguments) if text or names else None
        if self.path == "/v1/completions":
            return "".join(c["choices"][0]["text"] for c in self.chunks if c.get("choices")) or None
        if self.path == "/v1/messages":
            deltas = [c["delta"] for c in self.chunks if c["type"] == "content_block_delta"]
            return "".join(d.get("text") or d.get("partial_json") or "" for d in deltas) or None
        return "".join(c["delta"] for c in self.chunks if c["type"] == "response.output_text.delta") or None

    def ending(self) -> object:
        """Return how it ended and what was counted."""
        last = self.chunks[-1]
        if self.path == "/v1/messages":
            delta = next(c for c in self.chunks if c["type"] == "message_delta")
            return delta["delta"], delta["usage"]["output_tokens"], last["type"]
        if self.path == "/v1/responses":
            return last["type"], last["response"]["usage"]["output_tokens"], last["response"]["usage"]["input_tokens"]
        reasons = [c["choices"][0]["finish_reason"] for c in self.chunks if c.get("choices")]
        usage = next(c["usage"] for c in self.chunks if c.get("usage"))
        ids = next((c["sglext"].get("output_ids") for c in self.chunks if c.get("sglext")), None)
        return [r for r in reasons if r], usage["prompt_tokens"], usage["completion_tokens"], ids

    def check_frame(self) -> None:
        """One id, one beginning, one end."""
        if self.path == "/v1/messages":
            kinds = [c["type"] for c in self.chunks]
            assert [kinds.count(kind) for kind in ("message_start", "message_delta", "message_stop")] == [1, 1, 1]
        elif self.path == "/v1/responses":
            assert [c["sequence_number"] for c in self.chunks] == list(range(len(self.chunks)))
        else:
            assert len({(c["id"], c["created"], c["model"]) for c in self.chunks}) == 1
            roles = [c for c in self.chunks if c.get("choices") and c["choices"][0].get("delta", {}).get("role")]
            assert len(roles) == (self.path == "/v1/chat/completions")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[MortalEngine]]:
    folder = tmp_path_factory.mktemp("mortal")
    model = small_model(folder / "model")
    arguments = ("--model", str(model), "--served-model-name", MODEL, "--device-tokens", "12288", "--threads", "1")
    async with mortal_engines(folder, 2, arguments) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(engines: list[MortalEngine], tmp_path: Path) -> AsyncIterator[Client]:
    instances = [{"id": f"e{n}", "url": engine.url, "adapter": "embedded"} for n, engine in enumerate(engines)]
    settings = {
        "instances": instances,
        "stream": {"idle_timeout_s": 1.0},
        "health": {"interval_s": 0.2, "timeout_s": 0.5},
    }
    async with gateway_for([], tmp_path, ready_count=2, ready_limit_s=60, **settings) as client:
        yield client


async def disturbed(client: Client, count: int, disturb: Any) -> tuple[list[Stream], list[Stream]]:
    """Return streams that ran undisturbed, and the same under whose first engine something happened."""
    alone = await asyncio.gather(*(Stream(number).run(client) for number in range(count)))
    streams = [Stream(number) for number in range(count)]
    running = [asyncio.create_task(stream.run(client)) for stream in streams]
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    await disturb()
    await asyncio.gather(*running)
    return list(alone), streams


async def check(client: Client, alone: list[Stream], streams: list[Stream], victim: str) -> None:
    hurt = [stream for stream in streams if stream.instance == victim]
    assert len(hurt) >= 3
    records: dict[str, RequestRecord] = {r.request_id: r for r in await client.records(2 * len(streams))}
    went_on = 0
    for before, after in zip(alone, streams, strict=True):
        after.check_frame()
        assert (after.said(), after.ending()) == (before.said(), before.ending()), after.body
        record, same = records[after.request_id], records[before.request_id]
        assert record.outcome is Outcome.OK
        assert record.usage.output_tokens == same.usage.output_tokens
        assert record.usage.prompt_tokens == same.usage.prompt_tokens
        if len(record.attempts) > 1:
            went_on += 1
            first, second = record.attempts
            assert (first.instance, first.role, second.role) == (victim, AttemptRole.ANSWER, AttemptRole.CONTINUATION)
            assert first.error is not None
            assert second.delivered_pieces > 0
            assert record.decision is not None
            assert record.decision.instance == victim
            expected = record.decision.predicted_hit_tokens  # not what the second engine had of what it was given
            assert (record.usage.hit_tokens, record.usage.hit_source) == (expected, HitSource.INFERRED)
    assert went_on >= 3, [(stream.instance, stream.said()) for stream in streams]
    assert client.at_rest()


async def test_killed_under_streams(client: Client, engines: list[MortalEngine]) -> None:
    alone, streams = await disturbed(client, 16, engines[0].kill)
    await check(client, alone, streams, "e0")
    await engines[0].live()
    await client.gateway.fleet.until_ready(2)


async def test_stopped_under_streams(client: Client, engines: list[MortalEngine]) -> None:
    async def stop() -> None:
        engines[0].send(signal.SIGSTOP)

    try:
        alone, streams = await disturbed(client, 16, stop)
    finally:
        engines[0].send(signal.SIGCONT)
    await check(client, alone, streams, "e0")
