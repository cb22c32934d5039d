"""What every adapter promises, against the engine that it is for.

Where ``CONTRACT_<NAME>_URL`` names a running engine (``CONTRACT_VLLM_URL=http://127.0.0.1:8000``), it is asked; with
``CONTRACT_RECORD=1`` too, what it answers becomes the recording ``tests/captures/http_<name>.json``. Else that
recording is asked. The embedded engine always runs. ``openai`` is whatever ``CONTRACT_OPENAI_URL`` names; its recording
is of llama.cpp, asked by nothing but OpenAI's API. The engines that merely speak that were not there to be asked: what
is known of them is a table, held in ``test_flavours.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from billing.usage import openai_usage
from engine_adapter.base import Ask, Capabilities, InstanceFacts, LoadSignal, Merge
from engine_adapter.load import EngineLoad
from engine_adapter.named import ADAPTERS
from engine_adapter.wire_client import WireClient
from tests.contract.engine_wire import Player, Recorder
from tests.embedded_engines import engines as embedded_engines
from tracing.record import Usage

_CAPTURES = Path(__file__).parent.parent / "captures"
_RULES = "You are a careful assistant. " + " ".join(f"Rule {number}: be brief and correct." for number in range(20))
_IDS = list(range(300, 400))


@dataclass
class Answer:
    """An answer, or a stream's chunks, and what the adapter read of their counts."""

    chunks: list[Mapping[str, Any]]
    usage: Usage
    output_ids: tuple[int, ...] = ()


@dataclass
class Interview:
    """What an engine said. ``name``: the adapter's."""

    name: str
    able: Capabilities
    facts: InstanceFacts
    health: int
    loads: list[EngineLoad]
    plain: Answer
    again: Answer
    streamed: Answer
    salted: list[Answer] = field(default_factory=list)
    by_ids: Answer | None = None
    with_ids: Answer | None = None
    heeded: Answer | None = None


class Interviewer:
    """Asks as the gateway does: what the adapter prepares, over its client."""

    def __init__(self, name: str, client: Any, url: str) -> None:
        self.adapter, self.client, self.url = ADAPTERS[name], client, url
        self.facts, self.mark = InstanceFacts(), "recorded"

    async def run(self) -> Interview:
        self.facts = await self.adapter.describe(self.client, self.url, {})
        able = self.facts.capabilities or self.adapter.capabilities
        status, _ = await self._get(self.adapter.health_path)
        loads: list[EngineLoad] = []
        for path in self.adapter.load_paths:
            told, page = await self._get(path)
            if told == 200 and (loads := list(self.adapter.read_load(page))):
                break
        plain, again, streamed = await self._ask(), await self._ask(), await self._ask(stream=True)
        said = Interview(self.adapter.name, able, self.facts, status, loads, plain, again, streamed)
        if able.salt:
            said.salted = [await self._ask(salt=f"{self.mark}-{tenant}") for tenant in ("a", "a", "b")]
        if able.input_ids:
            said.by_ids = await self._ask(input_ids=_IDS)
        if able.output_ids:
            said.with_ids = await self._ask(wants_output_ids=True)
        heeds: dict[str, object] = {"priority": 1} if able.priority else {}
        if able.session:
            heeds["session"] = "a-run"
        said.heeded = await self._ask(**heeds)
        return said

    async def _get(self, path: str) -> tuple[int, bytes]:
        response = await self.client.request("GET", f"{self.url}{path}", {})
        try:
            return response.status, await response.read_all(1 << 24)
        finally:
            response.close()

    async def _ask(self, *, stream: bool = False, **more: Any) -> Answer:
        prepared = self.adapter.prepare(Ask("contract", stream=stream, **more))
        question = f"{_RULES} This is {self.mark}."
        body: dict[str, object] = {
            "model": self.facts.models[0],
            "messages": [{"role": "system", "content": question}, {"role": "user", "content": "Name a colour."}],
            "max_tokens": 8,
            "temperature": 0,
            **({"stream": True} if stream else {}),
        }
        for name, value in prepared.members.items():
            body[name] = dict(value.members) if isinstance(value, Merge) else value
        headers = {"content-type": "application/json", **prepared.headers}
        url = f"{self.url}/v1/chat/completions"
        response = await self.client.request("POST", url, headers, json.dumps(body).encode())
        try:
            answer = await response.read_all(1 << 24)
        finally:
            response.close()
        assert response.status == 200, answer
        chunks = _events(answer) if stream else [json.loads(answer)]
        parts = [found for chunk in chunks if (found := self.adapter.read_usage(chunk)) is not None]
        usage: Any = next((part.usage for part in reversed(parts) if part.usage), None)
        extension: Any = next((part.extension for part in reversed(parts) if part.extension), None)
        ids = next((tuple(part.output_ids) for part in parts if part.output_ids), ())
        able = self.facts.capabilities or self.adapter.capabilities
        return Answer(chunks, openai_usage(usage, extension, silence_is_zero=able.cached_detail).usage, ids)


def _events(answer: bytes) -> list[Mapping[str, Any]]:
    events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@cache
def interview(name: str) -> Interview:
    return asyncio.run(_interview(name))


async def _interview(name: str) -> Interview:
    recording = _CAPTURES / f"http_{name}.json"
    url = os.environ.get(f"CONTRACT_{name.upper()}_URL")
    if name == "embedded":
        with TemporaryDirectory() as folder:
            async with embedded_engines(Path(folder), 1) as urls, WireClient() as client:
                return await Interviewer(name, client, urls[0]).run()
    if url is None:
        return await Interviewer(name, Player(recording), "http://recorded").run()
    recorder = Recorder()
    asking = Interviewer(name, recorder, url)
    if not os.environ.get("CONTRACT_RECORD"):
        asking.mark = uuid.uuid4().hex  # what a former run left in its cache is none of ours
    said = await asking.run()
    if os.environ.get("CONTRACT_RECORD"):
        recorder.write(recording)
    return said


@pytest.fixture(
    scope="module",
    params=["sglang", "vllm", "llamacpp", "openai", pytest.param("embedded", marks=pytest.mark.model)],
)
def said(request: pytest.FixtureRequest) -> Interview:
    return interview(request.param)


def test_it_says_what_it_serves(said: Interview) -> None:
    assert said.facts.models
    assert said.health == 200
    if said.name == "openai":
        return  # whose API has nothing more to tell
    assert (said.facts.max_model_len or 0) > 0
    assert (said.facts.capacity_tokens or 0) > 0
    assert said.facts.version


def test_events_are_found_where_it_has_any(said: Interview) -> None:
    if said.able.events:
        assert (said.facts.block_size or 0) > 0
        assert [source.rank for source in said.facts.event_sources] == [0]
        assert said.facts.event_sources[0].endpoint.startswith("tcp://")
    else:
        assert said.facts.event_sources == ()


def test_answers_tell_their_tokens_and_their_hits(said: Interview) -> None:
    first, second = said.plain.usage, said.again.usage
    assert first.prompt_tokens == second.prompt_tokens > 100
    assert 0 < first.output_tokens <= 8
    assert first.hit_tokens < second.hit_tokens < second.prompt_tokens
    message = [each.chunks[0]["choices"][0]["message"]["content"] for each in (said.plain, said.again)]
    assert message[0] == message[1]
    if said.able.cached_detail:
        assert second.hit_device_tokens == second.hit_tokens
    else:
        assert second.hit_unknown_tokens == second.hit_tokens


def test_streams_tell_the_same(said: Interview) -> None:
    streamed = said.streamed.usage
    assert (streamed.prompt_tokens, streamed.output_tokens) == (
        said.again.usage.prompt_tokens,
        said.again.usage.output_tokens,
    )
    pieces = [choice["delta"].get("content") or "" for chunk in said.streamed.chunks for choice in chunk["choices"]]
    assert "".join(pieces) == said.again.chunks[0]["choices"][0]["message"]["content"]
    assert len([piece for piece in pieces if piece]) > 1


def test_a_salt_keeps_caches_apart(said: Interview) -> None:
    if not said.able.salt:
        assert not said.salted
        return
    first, again, other = (answer.usage.hit_tokens for answer in said.salted)
    assert (first, other) == (0, 0)
    assert again > 0


def test_ids_are_read_instead_of_messages(said: Interview) -> None:
    if said.able.input_ids:
        assert said.by_ids is not None
        assert said.by_ids.usage.prompt_tokens == len(_IDS)
    else:
        assert said.by_ids is None


def test_the_ids_of_an_answer_are_told_where_they_are_asked_for(said: Interview) -> None:
    if said.able.output_ids:
        assert said.with_ids is not None
        assert len(said.with_ids.output_ids) == said.with_ids.usage.output_tokens
    assert said.plain.output_ids == ()


def test_load_is_told(said: Interview) -> None:
    if said.able.load is LoadSignal.NONE:
        assert not said.loads
        return
    (load,) = said.loads
    assert (load.running, load.waiting, load.rank) == (0, 0, 0)
    assert load.used_share is None or 0 <= load.used_share <= 1


def test_what_it_heeds_is_taken(said: Interview) -> None:
    assert said.heeded is not None
    assert said.heeded.usage.prompt_tokens == said.plain.usage.prompt_tokens
