"""What is told and billed of a request whose attempts failed for different reasons."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.gateways import gateway_for
from tests.scripted_engine import Asked, Script, ScriptedEngine
from tracing.record import Outcome, UsageSource

_QUIET = {"interval_s": 60, "timeout_s": 2.0}


async def test_work_that_may_have_been_done_stays_known_when_the_next_engine_takes_nothing_on(tmp_path: Path) -> None:
    order: list[Asked] = []

    def script_for(asked: Asked) -> Script:
        order.append(asked)
        return Script(end="reset") if len(order) == 1 else Script(status=429, headers={"retry-after": "7"})

    async with ScriptedEngine() as a, ScriptedEngine() as b:
        a.script_for = b.script_for = script_for
        async with gateway_for([a, b], tmp_path, retry={"repeats": True}, health=_QUIET) as client:
            async with client.chat() as response:
                assert (response.status, response.headers["retry-after"]) == (429, "7")
            (record,) = await client.records(1)
            assert len(record.attempts) == 2
            assert record.usage.source is UsageSource.MISSING  # which is no charge of nothing, but an open one
            assert client.at_rest()


async def test_a_refusal_is_told_rather_than_that_another_engine_is_gone(tmp_path: Path) -> None:
    late, asked = asyncio.Event(), asyncio.Event()
    async with ScriptedEngine() as a, ScriptedEngine() as b:

        def script_for(engine: ScriptedEngine, other: ScriptedEngine) -> None:
            def play(what: Asked) -> Script:
                gone.append(other)
                asked.set()
                return Script(status=429, body={"message": "busy"}, headers={"retry-after": "7"}, wait_for=late)

            engine.script_for = play

        gone: list[ScriptedEngine] = []
        script_for(a, b)
        script_for(b, a)
        async with gateway_for([a, b], tmp_path, health=_QUIET) as client:
            waiting = asyncio.create_task(client.chat().__aenter__())
            await asked.wait()
            await gone[0].close()
            late.set()
            response = await waiting
            assert (response.status, response.headers["retry-after"]) == (429, "7")
            response.release()
            for path, names in (("/v1/models", "m"), ("/v1/models/m", "m"), ("/healthz", "")):
                async with client.session.get(client.url + path) as listed:
                    assert listed.status == 200
                    assert names in await listed.text()
            (record,) = await client.records(1)
            assert [attempt.error for attempt in record.attempts] == ["status_429", "connect_failed"]
            assert (record.outcome, record.usage.source) == (Outcome.UPSTREAM_REFUSED, UsageSource.NONE)
