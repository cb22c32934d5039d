"""How often engines are asked when they fail: one cap, whatever is set, and nothing twice that may have run."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.absence import Absence
from gateway.breaker import State
from tests.gateways import Client, gateway_for
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer, chunk, event, stream
from tracing.record import AttemptRole, Outcome

ROLE = event(chunk({"role": "assistant", "content": ""}))
FAILURES: dict[str, Script] = {
    "busy": Script(status=429, body={"error": {"message": "later", "type": "rate"}}, headers={"retry-after": "7"}),
    "overloaded": Script(status=503, body={"error": {"message": "later", "type": "rate"}}),
    "full, in its stream": Script(events=[event({"error": {"message": "the queue is full", "code": 503}})]),
    "failing": Script(status=500, body={"error": {"message": "ouch", "type": "server"}}),
    "resetting": Script(end="reset"),
    "resetting a stream": Script(events=[], end="reset"),
    "resetting behind the role": Script(events=[ROLE], end="reset"),
    "resetting behind a word": Script(events=stream(["one "])[:2], end="reset"),
    "ending behind a word": Script(events=stream(["one "])[:2]),
    "giving up at once": Script(events=[event({"error": {"message": "ouch", "type": "server"}})]),
    "giving up behind a word": Script(events=[*stream(["one "])[:2], event({"error": {"message": "ouch"}})]),
    "aborting": Script(events=[*stream(["one "])[:2], event(chunk({}, finish="abort"))]),
}
NOTHING_RAN = {"busy", "overloaded", "full, in its stream"}


@asynccontextmanager
async def fleet(home: Path, count: int, **settings: Any) -> AsyncIterator[tuple[list[ScriptedEngine], Client]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine()) for _ in range(count)]
        health = {"interval_s": 0.05, "timeout_s": 2.0, "breaker_failures": 1000, "slow_start_s": 0}
        settings = {"health": health, **settings}
        yield engines, await stack.enter_async_context(gateway_for(engines, home, **settings))


SETTINGS = list(itertools.product([1, 3], [False, True], [False, True]))


@pytest.mark.parametrize(("attempts", "repeats", "continues"), SETTINGS)
async def test_r15_b063_attempts_stay_under_the_cap_under_every_setting(
    attempts: int, repeats: bool, continues: bool, tmp_path: Path
) -> None:
    """Every kind of failure, on every endpoint, streamed or not, with engines that all fail alike."""
    retry = {"attempts": attempts, "repeats": repeats, "continues": continues}
    async with fleet(tmp_path, 5, retry=retry) as (engines, client):
        kinds = itertools.product(FAILURES, ["chat/completions", "completions", "messages", "responses"], [False, True])
        for name, endpoint, streams in kinds:
            if FAILURES[name].events is not None and not streams:
                continue  # no engine answers so
            for engine in engines:
                engine.forget()
                engine.script_for = lambda asked, name=name: FAILURES[name]  # type: ignore[misc]
            body: dict[str, Any] = {"model": "m", "stream": streams, "max_tokens": 9}
            words = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
            body |= words.get(endpoint, {"messages": [{"role": "user", "content": "hi"}]})
            if endpoint == "responses":
                del body["max_tokens"]
            async with client.session.post(f"{client.url}/v1/{endpoint}", json=body) as response:
                shown = await response.read()
            asked = sum(len(engine.asked) for engine in engines)
            assert 1 <= asked <= attempts, (name, endpoint, streams)
            assert max(len(engine.asked) for engine in engines) == 1, "no engine is asked twice"
            if name not in NOTHING_RAN and not repeats and (not continues or b"one" not in shown):
                assert asked == 1, f"{name}: what may have run ran again"
            record = await client.record(response.headers["x-keepwarm-request-id"])
            assert len(record.attempts) == asked
            assert record.outcome is not Outcome.OK
            if response.status == 200:
                assert b"error" in shown
        await client.until(client.at_rest)


async def test_what_may_run_again_is_seen_to_have(tmp_path: Path) -> None:
    """R15: repeated where policy says so, and then both attempts stand in the record; b067: a stream too."""
    for kind in ("resetting", "failing", "resetting behind the role", "giving up at once"):
        async with fleet(tmp_path / kind, 2, retry={"repeats": True}) as (engines, client):
            good, streams = Script(events=stream(["well"])), kind not in ("resetting", "failing")
            order: list[Script] = [FAILURES[kind], good if streams else Script(body=answer("well"))]
            for engine in engines:
                engine.script_for = lambda asked, order=order: order.pop(0)  # type: ignore[misc]
            async with client.chat(stream=streams) as response:
                shown = await response.read()
            assert response.status == 200
            assert shown.count(b"well") == 1
            if streams:
                assert shown.count(b'"role"') == 1
                assert shown.endswith(b"data: [DONE]\n\n")
            (record,) = await client.records(1)
            assert record.outcome is Outcome.OK
            assert [attempt.instance for attempt in record.attempts] in (["e0", "e1"], ["e1", "e0"])
            assert record.attempts[0].error is not None
            assert record.usage.prompt_tokens == 10


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages", "responses"])
async def test_who_is_refused_as_a_streams_first_word_is_answered_elsewhere(tmp_path: Path, endpoint: str) -> None:
    """Engines that begin a stream before they look at their queue can say so in no other way."""
    async with fleet(tmp_path, 2) as (engines, client):
        order = [FAILURES["full, in its stream"], Script(events=stream(["well"]))]
        for engine in engines:
            engine.script_for = lambda asked: order.pop(0)
        body: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        body |= {"max_tokens": 9} if endpoint == "messages" else {}
        if endpoint == "responses":
            body["input"] = body.pop("messages")
        async with client.session.post(f"{client.url}/v1/{endpoint}", json=body) as response:
            shown = await response.read()
        assert response.status == 200
        assert b"well" in shown
        assert b"queue" not in shown
        record = await client.record(response.headers["x-keepwarm-request-id"])
        assert record.outcome is Outcome.OK
        assert record.attempts[0].error is not None
        assert client.gateway.fleet.instances["e0"].breaker.state is State.CLOSED


async def test_an_instance_can_say_that_what_ran_there_may_run_again(tmp_path: Path) -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as other:
        one.script, other.script = FAILURES["resetting"], FAILURES["resetting"]
        instances = [
            {"id": "e0", "url": one.url, "repeats": True, "models": ["m"]},
            {"id": "e1", "url": other.url, "models": ["n"]},
        ]
        async with gateway_for([one, other], tmp_path, instances=instances) as client:
            async with client.chat(model="n") as response:
                assert response.status == 502
            assert len(other.asked) == 1
            assert client.gateway.fleet.instances["e0"].spec.repeats is True


async def test_b065_client_errors_open_no_breaker(tmp_path: Path) -> None:
    health = {"interval_s": 30.0, "timeout_s": 2.0, "breaker_failures": 2}
    async with fleet(tmp_path, 1, health=health) as ((engine,), client):
        for status, streams in itertools.product([400, 401, 403, 404, 408, 409, 413, 422, 429, 499], [False, True]):
            engine.script = Script(status=status, body={"error": {"message": "no", "type": "invalid_request_error"}})
            for _ in range(3):
                async with client.chat(stream=streams) as response:
                    assert response.status == (502 if status == 401 else status)  # 401 is about the gateway's own key
        assert client.gateway.fleet.instances["e0"].breaker.state is State.CLOSED
        engine.script = Script(body=answer("fine"))
        async with client.chat() as response:
            assert response.status == 200


async def test_b066_a_failing_engine_is_left_alone_and_gets_traffic_within_one_period(tmp_path: Path) -> None:
    """Its health path is fine all the time: only requests can tell. One goes there at a time, and no more."""
    period_s = 0.4
    health = {"interval_s": period_s, "timeout_s": 2.0, "breaker_failures": 2, "slow_start_s": 0}
    async with fleet(tmp_path, 2, health=health, retry={"repeats": True}) as ((bad, good), client):
        bad.script = FAILURES["failing"]
        await asyncio.gather(*(_asked(client) for _ in range(40)))
        failed = len(bad.asked)
        assert failed < 30, "most went to the good one"
        bad.script = Script(body=answer("well again"))
        instance = client.gateway.fleet.instances["e0"]
        assert instance.breaker.rest_s(time.monotonic()) <= period_s
        async with asyncio.timeout(10):
            while len(bad.asked) == failed:
                await _asked(client)
        assert instance.takes_requests
        assert all(asked.path == "/v1/chat/completions" for asked in bad.asked)
        assert good.asked


async def _asked(client: Client) -> None:
    async with client.chat() as response:
        await response.read()
        assert response.status == 200


async def test_a_half_open_breaker_lets_one_request_through(tmp_path: Path) -> None:
    health = {"interval_s": 0.1, "timeout_s": 2.0, "breaker_failures": 1, "slow_start_s": 0}
    async with fleet(tmp_path, 1, health=health) as ((engine,), client):
        engine.script = FAILURES["failing"]
        async with client.chat() as response:
            assert response.status == 500
        gate = asyncio.Event()
        engine.script = Script(body=answer("slow"), wait_for=gate)
        instance = client.gateway.fleet.instances["e0"]
        await client.until(lambda: instance.takes_requests)
        trial = asyncio.create_task(_asked(client))
        await engine.until(lambda: len(engine.asked) == 2)
        async with client.chat() as response:  # another one finds it closed
            assert response.status == 503
        gate.set()
        await trial
        await _asked(client)


async def test_b045_models_are_listed_while_engines_are_down(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as (engines, client):
        for engine in engines:
            await engine.close()
            async with client.chat() as response:
                await response.read()
            async with client.session.get(f"{client.url}/v1/models") as response:
                assert response.status == 200
                assert [model["id"] for model in (await response.json())["data"]] == ["m"]


async def test_who_finds_nobody_is_told_when_the_engine_will_be_back(tmp_path: Path) -> None:
    """As long as its last restart took: a client that comes each second helps nobody."""
    async with fleet(tmp_path, 1, health={"interval_s": 30.0, "timeout_s": 2.0}) as ((engine,), client):
        now_s = time.monotonic()
        absence = client.gateway.fleet.instances["e0"].absence = Absence(now_s - 40)
        absence.returned(now_s - 25)
        await engine.close()
        told = []
        for _ in range(2):  # the first one finds out
            async with client.chat() as response:
                told.append((response.status, int(response.headers["retry-after"])))
        assert [status for status, _ in told] == [502, 503]
        assert all(30 < after_s <= 45 for _, after_s in told)  # 15 s, and the time until a probe sees it


async def test_nothing_new_goes_to_an_instance_after_its_first_refused_connection(tmp_path: Path) -> None:
    health = {"interval_s": 30.0, "timeout_s": 2.0}
    async with fleet(tmp_path, 2, health=health) as ((gone, stays), client):
        await gone.close()
        await asyncio.gather(*(_asked(client) for _ in range(12)))
        await asyncio.gather(*(_asked(client) for _ in range(12)))
        records = await client.records(24)
        late = sorted(records, key=lambda record: record.stamps.arrived_ns)[12:]
        assert [attempt.instance for record in late for attempt in record.attempts] == ["e1"] * 12
        assert len(stays.asked) == 24


@pytest.mark.parametrize("which", ["first_byte_timeout_s", "idle_timeout_s", "total_timeout_s"])
async def test_each_instance_has_its_own_times(which: str, tmp_path: Path) -> None:
    never = asyncio.Event()
    async with ScriptedEngine() as engine:
        if which == "first_byte_timeout_s":
            engine.script = Script(body=answer("late"), wait_for=never)
        elif which == "idle_timeout_s":
            engine.script = Script(events=stream(["one ", "two"])[:2], end="hang")
        else:
            ticking = [event(chunk({"content": "x"})) for _ in range(1000)]
            engine.script = Script(events=ticking, pause=lambda number: _soon())
        instances = [{"id": "e0", "url": engine.url, which: 0.2}]
        async with gateway_for([engine], tmp_path, instances=instances) as client:
            async with client.chat(stream=which != "first_byte_timeout_s") as response:
                shown = await response.read()
            (record,) = await client.records(1)
            if which == "first_byte_timeout_s":
                assert response.status == 504
            else:
                assert record.outcome is Outcome.TRUNCATED
                assert record.error == ("over_time" if which == "total_timeout_s" else "upstream_timeout")
                assert b'"error"' in shown
        never.set()


def _soon() -> asyncio.Event:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, gate.set)
    return gate


async def test_the_second_engine_of_a_stream_is_no_repetition(tmp_path: Path) -> None:
    """The words that were delivered are given to it, and nothing is asked for twice."""
    asked: list[Asked] = []

    def script(request: Asked) -> Script:
        asked.append(request)
        return FAILURES["resetting behind a word"] if len(asked) == 1 else Script(events=stream(["two"], prompt=12))

    async with fleet(tmp_path, 2) as (engines, client):
        for engine in engines:
            engine.script_for = script
        async with client.chat(stream=True, max_tokens=9, stream_options={"include_usage": True}) as response:
            shown = (await response.read()).decode()
        first, second = (request.json for request in asked)
        assert "continue_final_message" not in first
        assert second["messages"] == [*first["messages"], {"role": "assistant", "content": "one"}]
        assert second["continue_final_message"] is True
        assert second["max_tokens"] == 8
        chunks = [json.loads(line[6:]) for line in shown.splitlines() if line.startswith("data: {")]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "one two"
        (record,) = await client.records(1)
        assert [attempt.role for attempt in record.attempts] == [AttemptRole.ANSWER, AttemptRole.CONTINUATION]
        assert record.usage.prompt_tokens + record.usage.output_tokens == 12 + 1
        usages = [c["usage"] for c in chunks if c.get("usage")]
        assert len(usages) == 1
        assert usages[0]["completion_tokens"] == record.usage.output_tokens == 2
