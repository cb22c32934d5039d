"""Streams of Messages and Responses under stress: silence, late refusals, clients that leave, ends that are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Json, Script, ScriptedEngine, stream
from tracing.record import Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: list[Json] = [{"role": "user", "content": "hi"}]
ASKS: dict[str, Json] = {
    "/v1/messages": {"model": "m", "max_tokens": 4, "messages": HI, "stream": True},
    "/c/x/v1/messages": {"model": "m", "max_tokens": 4, "messages": HI, "stream": True},
    "/v1/responses": {"model": "m", "input": "hi", "stream": True},
}
both = pytest.mark.parametrize("path", ASKS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(running_engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    home = tmp_path_factory.mktemp("home")
    async with gateway_for([running_engine], home, stream={"heartbeat_s": 0.05}) as client:
        yield client
        assert client.at_rest()


@both
async def test_r05_silence_is_filled_and_a_late_refusal_is_the_protocols_error(
    gateway: Client, engine: ScriptedEngine, path: str
) -> None:
    release = asyncio.Event()
    engine.script = Script(status=429, body={"error": {"message": "later", "type": "busy"}}, wait_for=release)
    async with gateway.session.post(f"{gateway.url}{path}", json=ASKS[path]) as response:
        assert response.status == 200
        assert await response.content.readuntil(b"\n\n") == b": keepwarm\n\n"
        release.set()
        data = await response.read()
    told = [event for event in data.split(b"\n\n") if event and not event.startswith(b":")]
    begun, failed = (
        ([b"response.created", b"response.in_progress"], [b"response.failed"]) if "input" in ASKS[path] else ([], [])
    )
    assert [event.split(b"\n")[0] for event in told] == [b"event: " + name for name in (*begun, b"error", *failed)]
    assert b"later" in told[len(begun)]
    assert b"[DONE]" not in data


@both
async def test_r03_a_client_that_leaves_stops_the_engine(gateway: Client, engine: ScriptedEngine, path: str) -> None:
    engine.script, hung_up = Script(events=stream(["a", "b"])[:3], end="hang"), engine.hung_up
    async with gateway.session.post(f"{gateway.url}{path}", json=ASKS[path]) as response:
        request_id = response.headers["x-keepwarm-request-id"]
        await response.content.readuntil(b"delta")
        response.close()
    await engine.until(lambda: engine.hung_up == hung_up + 1 and not engine.in_flight)
    record = await gateway.record(request_id)
    assert (record.outcome, record.status) == (Outcome.ABORTED, 200)


@both
async def test_b005_an_end_without_a_finish_reason_is_no_answer(
    gateway: Client, engine: ScriptedEngine, path: str
) -> None:
    engine.script = Script(events=[*stream(["a", "b"])[:3], b"data: [DONE]\n\n"])
    async with gateway.session.post(f"{gateway.url}{path}", json=ASKS[path]) as response:
        data = await response.read()
        request_id = response.headers["x-keepwarm-request-id"]
    assert b"event: error\n" in data
    assert not any(word in data for word in (b"message_stop", b"response.completed", b'"stop_reason":"end_turn"'))
    assert (await gateway.record(request_id)).outcome is Outcome.TRUNCATED


@both
async def test_a_finish_without_the_end_mark_is_a_whole_answer(
    gateway: Client, engine: ScriptedEngine, path: str
) -> None:
    engine.script = Script(events=stream(["a", "b"])[:4])  # no counts either
    async with gateway.session.post(f"{gateway.url}{path}", json=ASKS[path]) as response:
        data = await response.read()
        request_id = response.headers["x-keepwarm-request-id"]
    assert data.count(b"event: message_stop\n") + data.count(b"event: response.completed\n") == 1
    assert (await gateway.record(request_id)).outcome is Outcome.OK


@both
async def test_an_engine_that_gives_up_ends_no_answer(gateway: Client, engine: ScriptedEngine, path: str) -> None:
    events = stream(["a"])
    engine.script = Script(events=[*events[:2], events[2].replace(b'"stop"', b'"abort"'), *events[3:]])
    async with gateway.session.post(f"{gateway.url}{path}", json=ASKS[path]) as response:
        data = await response.read()
        request_id = response.headers["x-keepwarm-request-id"]
    assert b"event: error\n" in data
    record = await gateway.record(request_id)
    assert (record.outcome, record.error) == (Outcome.TRUNCATED, "engine_gave_up")
    engine.script = Script(body={"choices": [{"finish_reason": "abort", "message": {"content": "x"}}]})
    async with gateway.session.post(f"{gateway.url}{path}", json=ASKS[path] | {"stream": False}) as response:
        assert response.status == 502
