"""The embedded engine as a process, through its HTTP surface and its event sockets, with the official OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError
from prometheus_client.parser import text_string_to_metric_families

from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.event_socket import EventSocket
from engine_adapter.prompt import PromptEncoder
from kvstore.block import content_hashes, event_hash
from kvstore.events import BlocksStored, TierCleared
from kvstore.page import Tier

pytestmark = pytest.mark.model
PAGE = 16
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "enum": [3, 5]}, "b": {"type": "integer", "enum": [4, 6]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class ServerProcess:
    """One engine process on free ports, with a disk of its own that outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def start(self) -> None:
        flags = ["--port", "0", "--device-tokens", "2048", "--host-bytes", "256MiB", "--disk-bytes", "512MiB"]
        command = [sys.executable, "-m", "engine_adapter.embedded", *flags, "--disk-path", str(self._folder / "disk")]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # ends with the process, so a failed start fails here
        assert line, (self._folder / "log").read_text()
        self.ready = json.loads(line)

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    ensure_default_model()
    process = ServerProcess(tmp_path_factory.mktemp("engine"))
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(ensure_default_model())


@pytest.fixture
async def client(process: ServerProcess) -> Any:
    async with AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(process: ServerProcess) -> Any:
    async with aiohttp.ClientSession(process.url) as session:
        yield session


async def ask(client: AsyncOpenAI, messages: list[Any] = QUESTION, **options: Any) -> Any:
    options = {"max_tokens": 12, "temperature": 0, **options}
    return await client.chat.completions.create(model="default", messages=messages, **options)


async def load(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/v1/loads") as response:
        return dict((await response.json())["loads"][0])


async def test_a_stream_says_what_an_answer_says(client: AsyncOpenAI) -> None:
    whole = await ask(client)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    stream = await ask(client, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_completions_take_text_and_ids_alike(client: AsyncOpenAI, encoder: PromptEncoder) -> None:
    prompt = "The capital of France is"
    by_text = await client.completions.create(model="m", prompt=prompt, max_tokens=4, temperature=0)
    by_ids = await client.completions.create(model="m", prompt=encoder.encode_text(prompt), max_tokens=4, temperature=0)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.choices[0].finish_reason == "length"
    assert by_text.usage is not None
    assert by_text.usage.completion_tokens == 4
    stream = await client.completions.create(model="m", prompt=prompt, max_tokens=4, temperature=0, stream=True)
    assert "".join([c.choices[0].text async for c in stream if c.choices]) == by_text.choices[0].text


async def test_a_named_tool_is_called_and_the_next_step_hits_its_prompt(client: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 3 + 4? Use the tool. " + "Think of numbers. " * 20}]
    forced = {"type": "function", "function": {"name": "add"}}
    first = await ask(client, messages, tools=[ADD], tool_choice=forced, max_tokens=60)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    [call] = message.tool_calls
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert arguments["a"] in (3, 5)
    assert arguments["b"] in (4, 6)
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    second = await ask(client, messages, tools=[ADD], max_tokens=4)
    # The call was sent back as it was generated: its pages are hit too, not only those of the prompt.
    seen = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= (seen - 1) // PAGE * PAGE
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // PAGE * PAGE


async def test_a_required_call_streams_its_name_before_its_arguments(client: AsyncOpenAI) -> None:
    stream = await ask(
        client, tools=[ADD], tool_choice="required", parallel_tool_calls=False, max_tokens=60, stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].function.name == "add"
    assert calls[0].id.startswith("call_")
    assert calls[0].function.arguments == ""
    assert len(calls) > 3
    assert json.loads("".join(call.function.arguments for call in calls))["a"] in (3, 5)
    assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "minItems": 100_000_000, "items": {"type": "null"}},
    ],
)
async def test_a_schema_that_nothing_can_satisfy_is_its_clients_mistake(
    client: AsyncOpenAI, schema: dict[str, Any], stream: bool
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(BadRequestError, match=r"constrained|schema") as refused:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], response_format=wanted, stream=stream, max_tokens=4
        )  # type: ignore[call-overload]
    assert len(str(refused.value)) < 600
    assert (await ask(client, max_tokens=2)).usage is not None  # and nobody else's


async def test_a_schema_is_kept_to(client: AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = await ask(client, response_format=wanted, max_tokens=40)
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"city", "size"}
    assert len(value["city"]) <= 8
    assert value["size"] in ("small", "large")


async def test_a_seed_makes_sampling_repeatable_and_stop_strings_end_it(client: AsyncOpenAI) -> None:
    first, second = [await ask(client, temperature=1.0, seed=7, max_tokens=10) for _ in range(2)]
    assert first.choices[0].message.content == second.choices[0].message.content
    stopped = await ask(client, stop=[" France"])
    assert stopped.choices[0].message.content == "The capital of"
    assert stopped.choices[0].finish_reason == "stop"


async def test_a_repeated_prompt_hits_the_device_and_a_salt_does_not(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Repeat after me. " * 30}]
    details = {"return_cached_tokens_details": True}
    first = await ask(client, messages, max_tokens=1, extra_body=details)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    again = await ask(client, messages, max_tokens=1, extra_body=details)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached == (again.usage.prompt_tokens - 1) // PAGE * PAGE
    assert again.sglext["cached_tokens_details"] == {
        "device": cached, "host": 0, "storage": 0, "storage_backend": "keepwarm", "disk": 0, "pool": 0
    }  # fmt: skip
    salted = await ask(client, messages, max_tokens=1, extra_body={"cache_salt": "other tenant"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].message.content == again.choices[0].message.content
    assert not hasattr(salted, "sglext")


BAD_BODIES: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "prompt"),
    ({"messages": QUESTION, "max_tokens": 100_000}, "max_tokens"),
    ({"messages": QUESTION, "input_ids": [1, 49_152]}, "prompt"),
    ({"messages": QUESTION, "input_ids": [-1]}, "prompt"),
    ({"messages": QUESTION, "input_ids": []}, "prompt"),
    ({"messages": QUESTION, "n": 2}, "n"),
    ({"messages": QUESTION, "logprobs": True}, "logprobs"),
    ({"messages": QUESTION, "temperature": "hot"}, "temperature"),
    ({"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (
        {
            "messages": QUESTION,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}},
        },
        "response_format",
    ),
    ({"messages": QUESTION, "tools": [ADD], "tool_choice": {"function": {"name": "sub"}}}, "tool_choice"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 300_000}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": json.loads("[" * 500 + "]" * 500)}]}, "messages"),
    ({"messages": QUESTION, "tools": [{**ADD, "more": json.loads("[" * 500 + "]" * 500)}]}, "messages"),
    ({}, None),
]


async def test_bad_requests_are_refused_by_name_and_harm_no_stream(
    client: AsyncOpenAI, http: aiohttp.ClientSession
) -> None:
    story = [{"role": "user", "content": "Tell me a story about a warm engine."}]
    alone = await ask(client, story, max_tokens=30)

    async def tell() -> str:
        stream = await ask(client, story, max_tokens=30, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with asyncio.TaskGroup() as group:
        telling = group.create_task(tell())
        for body, param in BAD_BODIES:
            async with http.post("/v1/chat/completions", json=body) as response:
                answer = await response.json()
            assert response.status == 400, answer
            assert (answer["object"], answer["param"]) == ("error", param), answer
        async with http.post("/v1/chat/completions", data=b"{nonsense") as response:
            assert response.status == 400
        async with http.get("/v1/nothing") as response:
            assert (response.status, (await response.json())["object"]) == (404, "error")
    assert telling.result() == alone.choices[0].message.content
    with pytest.raises(BadRequestError, match="49151"):
        await ask(client, extra_body={"input_ids": [10**9]})


async def test_a_client_that_goes_away_ends_its_work(client: AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    stream = await ask(client, max_tokens=1500, stream=True, extra_body={"stop_token_ids": [], "rid": "left"})
    async for _ in stream:
        break
    assert (await load(http))["num_running_reqs"] == 1
    await stream.close()
    async with asyncio.timeout(20):
        while (await load(http))["num_running_reqs"]:
            pass
    assert (await load(http))["num_used_tokens"] == 0


async def test_a_request_is_aborted_by_its_name(client: AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    story = [{"role": "user", "content": "Count from one to one thousand in words."}]
    stream = await ask(client, story, max_tokens=1500, stream=True, extra_headers={"x-override-rid": "count"})
    reasons = []
    async for chunk in stream:
        if not reasons:
            async with http.post("/abort_request", json={"rid": "count"}) as response:
                assert response.status == 200
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "abort"


async def test_events_name_the_blocks_of_a_prompt(
    client: AsyncOpenAI, http: aiohttp.ClientSession, encoder: PromptEncoder
) -> None:
    messages = [{"role": "user", "content": "Announce these blocks to everybody. " * 12}]
    answer = await ask(client, messages, max_tokens=1, extra_body={"cache_salt": "s"})
    ids = encoder.encode_chat(messages)
    assert len(ids) == answer.usage.prompt_tokens
    wanted = {event_hash(digest) % 2**64 for digest in content_hashes(ids, PAGE, salt="s")}
    async with http.get("/server_info") as response:
        info = (await response.json())["kv_events"]
    assert (info["publisher"], info["block_size"], info["dp_size"]) == ("zmq", PAGE, 1)
    socket = EventSocket(
        f"tcp://127.0.0.1:{info['endpoint_port_base']}",
        f"tcp://127.0.0.1:{info['replay_endpoint_port_base']}",
    )
    held: dict[Tier, set[int]] = {}
    async with asyncio.timeout(20):
        while not all(wanted <= held.get(tier, set()) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)):
            replay = await socket.replay(0)
            assert replay is not None
            batches = replay.batches
            assert [batch.sequence for batch in batches] == list(range(len(batches)))
            assert isinstance(batches[0].events[0], TierCleared)
            held = {}
            for event in (event for batch in batches for event in batch.events):
                if isinstance(event, BlocksStored) and event.salt == "s":
                    held.setdefault(event.tier, set()).update(name % 2**64 for name in event.hashes)
                    roots = content_hashes(event.token_ids, PAGE, salt="s")
                    if event.parent is None:
                        assert [event_hash(d) % 2**64 for d in roots] == [name % 2**64 for name in event.hashes]
    assert held[Tier.DEVICE] == wanted


async def test_the_surface_tells_what_the_engine_is(
    client: AsyncOpenAI, http: aiohttp.ClientSession, encoder: PromptEncoder
) -> None:
    [card] = (await client.models.list()).data
    assert (card.id, card.max_model_len) == ("SmolLM2-135M-Instruct", 2048)  # type: ignore[attr-defined]
    async with http.post("/v1/tokenize", json={"messages": QUESTION}) as response:
        assert (await response.json())["tokens"] == encoder.encode_chat(QUESTION)
    async with http.get("/server_info") as response:
        info = await response.json()
    assert info["keepwarm"]["tiers"] == ["device", "host", "disk"]
    assert info["chat_template"] == "chatml-tools"
    assert len(info["weights_id"]) == 32
    async with http.get("/health") as response:
        assert response.status == 200
    async with http.get("/metrics") as response:
        text = await response.text()
    assert 'sglang:num_running_reqs{model_name="SmolLM2-135M-Instruct"} 0.0' in text
    assert "sglang:time_to_first_token_seconds_bucket" in text


async def pages_written_to_disk(http: aiohttp.ClientSession) -> float:
    async with http.get("/metrics") as response:
        text = await response.text()
    wanted = {"tier": "disk", "event": "puts"}.items()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(s.value for s in samples if s.name == "keepwarm_engine_tier_pages_total" and wanted <= s.labels.items())


async def test_a_flush_forgets_memory_and_keeps_the_disk(client: AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "Flush this one. " * 20}]
    told = {"return_cached_tokens_details": True}
    before = await pages_written_to_disk(http)
    first = await ask(client, messages, extra_body=told)
    known = sum(first.sglext["cached_tokens_details"][tier] for tier in ("device", "host", "disk"))
    async with asyncio.timeout(60):  # what is still on its way down when it is flushed goes, too
        while await pages_written_to_disk(http) < before + (first.usage.prompt_tokens - known) // PAGE:
            pass
    async with http.post("/flush_cache") as response:
        assert response.status == 200
    again = await ask(client, messages, extra_body=told)
    details = again.sglext["cached_tokens_details"]
    assert (details["device"], details["host"]) == (0, 0)
    assert details["disk"] == (again.usage.prompt_tokens - 1) // PAGE * PAGE
    assert again.choices[0].message.content == first.choices[0].message.content


async def test_a_restart_on_the_same_disk_serves_from_it(process: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Remember me over a restart. " * 20}]
    async with AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        first = await ask(client, messages)
    assert process.stop() == 0
    process.start()
    async with AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        again = await ask(client, messages, extra_body={"return_cached_tokens_details": True})
    hit = (again.usage.prompt_tokens - 1) // PAGE * PAGE
    assert again.sglext["cached_tokens_details"]["disk"] == hit
    assert again.choices[0].message.content == first.choices[0].message.content
    socket = EventSocket("tcp://127.0.0.1:1", f"tcp://127.0.0.1:{process.ready['kv_replay_port']}")
    replay = await socket.replay(0)
    assert replay is not None
    batches = replay.batches
    assert isinstance(batches[0].events[0], TierCleared)
    stored = [event for batch in batches for event in batch.events if isinstance(event, BlocksStored)]
    assert any(event.tier is Tier.DISK for event in stored)


def test_a_wrong_flag_or_a_port_that_is_taken_ends_the_start(process: ServerProcess, tmp_path: Path) -> None:
    def start(*flags: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "engine_adapter.embedded", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
        return done.returncode, done.stderr

    path = tmp_path / "engine.json"
    path.write_text('{"device_token": 3}')
    code, text = start("--config", str(path))
    assert (code, "device_token" in text) == (2, True)
    code, text = start("--port", process.url.rpartition(":")[2])
    assert (code, "in use" in text) == (1, True)
