"""The gateway with one real embedded engine: what it predicts is what the engine reports, and what it bills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engine_adapter.event_socket import EventSocket
from tests.gateways import Client, gateway_for
from tests.samples.sdk import anthropic_client, openai_client, strictly
from tracing.record import Outcome, RequestRecord, UsageSource

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

MODEL = "SmolLM2-135M-Instruct"
PAGE = 16
SYSTEM = "You keep an order desk. Answer in one short sentence. " * 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    embedded = {
        "enabled": True,
        "device_tokens": 4096,
        "host_bytes": 64 << 20,
        "disk_bytes": 256 << 20,
        "pool_bytes": 128 << 20,
        "page_tokens": PAGE,
    }
    home = tmp_path_factory.mktemp("home")
    async with gateway_for([], home, instances=[], embedded=embedded, ready_limit_s=240, ready_count=1) as client:
        yield client
        assert client.at_rest()


async def settled(client: Client) -> None:
    """Wait until the index holds everything that the engine has published."""
    instance = client.gateway.fleet.instances["embedded-0"]
    assert instance.facts is not None
    (source,), feed = instance.facts.event_sources, instance.feed
    published = await EventSocket(source.endpoint, source.replay_endpoint).replay(0)
    assert published is not None
    assert published.last is not None
    last = published.last
    await client.until(lambda: feed.next_sequence is not None and feed.next_sequence > last)


class Talk:
    """A growing conversation."""

    def __init__(self, client: Client, name: str, **more: Any) -> None:
        self._client, self._name, self._more = client, name, more
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": f"{name}. {SYSTEM}"}]

    async def say(self, text: str, *, stream: bool = False) -> RequestRecord:
        """Say something and return the request's record."""
        self._messages.append({"role": "user", "content": text})
        body = {"messages": self._messages, "max_tokens": 6, "temperature": 0, "stream": stream, **self._more}
        async with self._client.chat({"x-keepwarm-run": self._name}, model=MODEL, **body) as response:
            assert response.status == 200, await response.text()
            request_id = response.headers["x-keepwarm-request-id"]
            answer = await response.read() if stream else (await response.json())["choices"][0]["message"]
        self._messages.append({"role": "assistant", "content": "Done."} if isinstance(answer, bytes) else answer)
        return await self._client.record(request_id)


def _agrees(record: RequestRecord) -> None:
    assert record.outcome is Outcome.OK
    assert record.usage.source is UsageSource.ENGINE
    assert record.gateway_prompt_tokens == record.usage.prompt_tokens
    assert record.decision is not None
    assert record.decision.exact
    assert record.decision.predicted_hit_tokens == record.usage.hit_tokens
    assert not record.usage_problems


async def test_each_step_of_a_chat_hits_its_predecessor_as_predicted(client: Client) -> None:
    talk, before = Talk(client, "growing"), 0
    for number in range(4):
        await settled(client)
        record = await talk.say(f"How many lamps are on shelf {number}?", stream=number % 2 == 1)
        _agrees(record)
        assert record.usage.hit_tokens >= before // PAGE * PAGE
        assert record.link is not None
        assert (record.link.run_id, record.link.step) == ("growing", number + 1)
        before = record.usage.prompt_tokens
    assert before > 0


async def test_another_salt_shares_nothing(client: Client) -> None:
    plain, salted = Talk(client, "twin"), Talk(client, "twin", cache_salt="apart")
    first = await plain.say("What is in stock?")
    await settled(client)
    second = await salted.say("What is in stock?")
    await settled(client)
    third = await salted.say("And on order?")
    _agrees(second)
    _agrees(third)
    assert (first.usage.prompt_tokens, second.usage.hit_tokens) == (second.usage.prompt_tokens, 0)
    assert third.usage.hit_tokens >= second.usage.prompt_tokens // PAGE * PAGE


async def test_pages_come_back_from_disk_after_a_restart(client: Client) -> None:
    talk = Talk(client, "restarted")
    before = await talk.say("Which chairs are short?")
    async with client.session.post(f"{client.url}/keepwarm/v1/instances/embedded-0/restart") as response:
        assert response.status == 200
    await client.until(lambda: client.gateway.fleet.instances["embedded-0"].takes_requests, limit_s=120)
    await settled(client)
    after = await talk.say("And which desks?")
    _agrees(after)
    assert after.usage.hit_disk_tokens >= before.usage.prompt_tokens // PAGE * PAGE


async def test_a_client_that_leaves_frees_the_engine(client: Client) -> None:
    messages = [{"role": "user", "content": "Count to a thousand."}]
    url = client.gateway.fleet.instances["embedded-0"].spec.url
    async with client.chat(model=MODEL, messages=messages, stream=True, max_tokens=2000) as response:
        request_id = response.headers["x-keepwarm-request-id"]
        await response.content.readuntil(b"\n\n")
        response.close()
    record = await client.record(request_id)
    assert record.outcome is Outcome.ABORTED

    async with asyncio.timeout(10):
        while True:
            async with client.session.get(f"{url}/v1/loads") as response:
                if not (await response.json())["loads"][0]["num_running_reqs"]:
                    break
    assert client.at_rest()


async def test_the_engines_verdict_on_a_bad_request_comes_through(client: Client) -> None:
    async with client.chat(model=MODEL, messages=[{"role": "emperor", "content": "x"}]) as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert "role" in error["message"]
        record = await client.record(response.headers["x-keepwarm-request-id"])
    assert (record.outcome, record.charge.amount_nano) == (Outcome.UPSTREAM_REFUSED, 0)


async def test_the_other_apis_ask_the_same_prompt_and_are_steps_of_one_run(client: Client) -> None:
    """One conversation over three APIs: counts agree, each step hits the one before, and all are one run."""
    headers = {"x-keepwarm-run": "three-apis"}
    talk = Talk(client, "three-apis")
    before = await talk.say("Which lamps are on shelf one?")
    messages: list[dict[str, Any]] = list(talk._messages)
    async with (
        anthropic_client(client.url, default_headers=headers) as claude,
        openai_client(client.url, default_headers=headers) as gpt,
    ):
        question = {"role": "user", "content": "And on shelf two?"}
        ask: dict[str, Any] = {"model": MODEL, "system": messages[0]["content"], "messages": [*messages[1:], question]}
        counted = await claude.messages.count_tokens(**ask)
        await settled(client)
        async with claude.messages.stream(**ask, max_tokens=6, extra_body={"temperature": 0}) as events:
            message = strictly(await events.get_final_message())
            second = await client.record(events.response.headers["x-keepwarm-request-id"])
        usage = message.usage
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens == second.usage.prompt_tokens
        assert usage.cache_read_input_tokens >= before.usage.prompt_tokens // PAGE * PAGE
        said = {"role": "assistant", "content": message.content[0].text}  # type: ignore[union-attr]
        items: list[Any] = [*messages[1:], question, said, {"role": "user", "content": "And on shelf three?"}]
        await settled(client)
        ask = {"model": MODEL, "instructions": messages[0]["content"], "input": items}
        counted_items = strictly(await gpt.responses.input_tokens.count(**ask))
        response = strictly(await gpt.responses.create(**ask, max_output_tokens=6, temperature=0))
        third = await client.record(str(response._request_id))
    assert response.usage is not None
    assert response.usage.input_tokens == third.usage.prompt_tokens == third.gateway_prompt_tokens
    assert response.usage.input_tokens == counted_items.input_tokens
    assert response.usage.input_tokens_details.cached_tokens >= second.usage.prompt_tokens // PAGE * PAGE
    for record in (second, third):
        _agrees(record)
    assert [record.link and (record.link.run_id, record.link.step) for record in (before, second, third)] == [
        ("three-apis", step) for step in (1, 2, 3)
    ]
    assert [record.endpoint for record in (before, second, third)] == ["chat", "messages", "responses"]


async def test_tokens_are_told_as_the_engine_sees_them(client: Client) -> None:
    messages = [{"role": "user", "content": "Grüße, 世界"}]
    url = client.gateway.fleet.instances["embedded-0"].spec.url
    for body in ({"messages": messages}, {"prompt": "Grüße, 世界"}):
        told = []
        for root in (client.url, url):
            async with client.session.post(f"{root}/tokenize", json={"model": MODEL, **body}) as response:
                told.append(await response.json())
        assert told[0] == told[1]
        async with client.session.post(
            f"{client.url}/detokenize", json={"model": MODEL, "tokens": told[0]["tokens"]}
        ) as response:
            assert "Grüße, 世界" in (await response.json())["text"]
    async with client.session.post(f"{client.url}/detokenize", json={"model": MODEL, "tokens": [10**8]}) as response:
        assert response.status == 400
