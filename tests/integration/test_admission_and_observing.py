"""Turns, observing and seeds, in a whole gateway."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.settings import load_settings
from tests.gateways import gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, stream
from tracing.record import Outcome


async def test_requests_wait_for_their_turn_and_too_many_are_told_when_to_come_again(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        gate = asyncio.Event()
        engine.script = Script(body=answer("hello"), wait_for=gate)
        admission = {"requests_per_instance": 1, "queue": 2}
        async with gateway_for([engine], tmp_path, admission=admission) as client:

            async def ask() -> tuple[int, str | None]:
                async with client.chat() as response:
                    await response.read()
                    return response.status, response.headers.get("retry-after")

            running = [asyncio.create_task(ask()) for _ in range(3)]
            await client.until(lambda: client.gateway.flights.count == 3 and engine.in_flight == 1)
            assert await ask() == (429, "2")
            async with client.session.get(f"{client.url}/metrics") as response:
                metrics = await response.text()
            assert 'keepwarm_queue_requests{model="m"} 2.0' in metrics
            assert 'keepwarm_recommended_replicas{model="m"}' in metrics
            gate.set()
            assert [status for status, _ in await asyncio.gather(*running)] == [200] * 3
            await client.records(4)
            assert client.at_rest()


async def test_who_waited_too_long_is_sent_away_and_who_leaves_the_queue_frees_it(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        gate = asyncio.Event()
        engine.script = Script(body=answer("hello"), wait_for=gate)
        admission = {"requests_per_instance": 1, "queue": 1, "deadline_s": 0.1}
        async with gateway_for([engine], tmp_path, admission=admission) as client:
            first = asyncio.create_task(_status(client))
            await client.until(lambda: engine.in_flight == 1)
            assert await _status(client) == 429
            leaving = asyncio.create_task(_status(client))
            await client.until(lambda: client.gateway.flights.count == 2)
            leaving.cancel()
            await client.until(lambda: client.gateway.flights.count == 1)
            gate.set()
            assert await first == 200
            assert await _status(client) == 200


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_who_asked_for_a_stream_hears_while_it_waits_and_of_what_came_of_it_in_its_own_words(
    tmp_path: Path, path: str
) -> None:
    said = {"input": "hi"} if path == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    asked = {"model": "m", "stream": True, "max_tokens": 4, **said}
    async with ScriptedEngine() as engine:
        gate = asyncio.Event()
        whole, streamed = Script(body=answer("hi"), wait_for=gate), Script(events=stream(["hello"]), wait_for=gate)
        engine.script_for = lambda asked: streamed if asked.json.get("stream") else whole
        admission = {"requests_per_instance": 1, "queue": 2, "deadline_s": 1.0}
        async with gateway_for([engine], tmp_path, admission=admission, stream={"heartbeat_s": 0.02}) as client:
            first = asyncio.create_task(_status(client))
            await client.until(lambda: engine.in_flight == 1)
            async with client.session.post(f"{client.url}/v1/{path}", json=asked) as late:
                assert late.status == 200
                assert await late.content.readuntil(b"\n\n") == b": keepwarm\n\n"
                told = (await late.read()).replace(b": keepwarm\n\n", b"")
                record = await client.record(late.headers["x-keepwarm-request-id"])
            assert b"no turn came" in told
            assert told.startswith(b"data: {" if path == "chat/completions" else b"event: error\n")
            assert (record.outcome, record.error, len(engine.asked)) == (Outcome.REJECTED, "overloaded", 1)
            async with client.session.post(f"{client.url}/v1/{path}", json=asked) as served:
                assert await served.content.readuntil(b"\n\n") == b": keepwarm\n\n"
                gate.set()
                assert b"hello" in await served.read()
            assert await first == 200
            assert client.at_rest()


async def test_a_priority_that_is_none_is_refused(tmp_path: Path) -> None:
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, admission={"requests_per_instance": 1}) as client,
    ):
        async with client.chat({"x-keepwarm-priority": "urgent"}) as response:
            assert response.status == 400
        async with client.chat({"x-keepwarm-priority": "batch"}) as response:
            assert response.status == 200


async def test_observing_changes_nothing_and_records_what_would_have_been_chosen(tmp_path: Path) -> None:
    async with ScriptedEngine() as router, ScriptedEngine() as one, ScriptedEngine() as other:
        async with gateway_for([router, one, other], tmp_path, routing={"through": "e0"}) as client:
            for _ in range(4):
                assert await _status(client) == 200
            records = await client.records(4)
        assert [len(engine.asked) for engine in (router, one, other)] == [4, 0, 0]
        for record in records:
            assert record.decision is not None
            assert record.decision.instance == "e0"
            assert record.decision.preferred in ("e1", "e2")
            assert len(record.decision.candidates) == 3


async def test_the_same_seed_goes_to_the_same_instance(tmp_path: Path) -> None:
    async with (
        ScriptedEngine() as one,
        ScriptedEngine() as two,
        ScriptedEngine() as three,
        gateway_for([one, two, three], tmp_path) as client,
    ):
        homes = dict[int, Counter[str]]()
        for seed in range(6):
            for _ in range(4):
                async with client.chat(seed=seed) as response:
                    assert response.status == 200
                    homes.setdefault(seed, Counter())[response.headers["x-keepwarm-instance"]] += 1
    assert all(len(home) == 1 for home in homes.values()), homes
    assert len(set().union(*homes.values())) > 1


async def _status(client: object) -> int:
    async with client.chat() as response:  # type: ignore[attr-defined]
        await response.read()
        return int(response.status)


def test_what_everything_goes_through_must_be_there() -> None:
    with pytest.raises(SettingsError, match=r"routing.through: there is no instance 'router'"):
        load_settings(
            flags={"routing": {"through": "router"}, "instances": [{"id": "a", "url": "http://127.0.0.1:1"}]},
            environment={},
        )
