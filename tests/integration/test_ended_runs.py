"""What engines and waiting requests get of a run that has ended, and what engines are told of runs and priorities."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import quote

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, stream

KEYS = [{"id": "a", "secret": "sk-a"}, {"id": "b", "secret": "sk-b"}]
A, B = {"authorization": "Bearer sk-a"}, {"authorization": "Bearer sk-b"}
HEEDS = {"enable_session_radix_cache": True, "enable_priority_scheduling": True}


def closed(engine: ScriptedEngine) -> list[str]:
    return [json.loads(asked.body)["session_id"] for asked in engine.looked_up if asked.path == "/close_session"]


async def step(client: Client, run: str, key: dict[str, str] = A, **more: str) -> int:
    async with client.chat({**key, "x-keepwarm-run": run, **{n.replace("_", "-"): v for n, v in more.items()}}) as told:
        await told.read()
        return int(told.status)


async def test_an_engine_that_heeds_sessions_is_told_of_runs_and_of_their_ends(tmp_path: Path) -> None:
    async with ScriptedEngine(info=HEEDS) as heeds, ScriptedEngine() as plain:
        heeds.pages["/close_session"] = b""
        async with gateway_for([heeds, plain], tmp_path, keys=KEYS, routing={"policy": "round-robin"}) as client:
            for run, key in (("r/1 é", A), ("r/1 é", A), ("r/1 é", B), ("r/1 é", B), ("other", A), ("other", A)):
                assert await step(client, run, key) == 200
            assert sorted(asked.json["session_id"] for asked in heeds.asked) == ["a/other", "a/r/1 é", "b/r/1 é"]
            assert all("session_id" not in asked.json for asked in plain.asked)
            end = f"{client.url}/keepwarm/v1/runs/{quote('r/1 é', safe='')}/end"
            for headers, status in (({}, 401), (A, 200), (A, 200)):
                async with client.session.post(end, headers=headers) as told:
                    assert told.status == status
            async with client.session.post(f"{client.url}/keepwarm/v1/runs/none/end", headers=A) as told:
                assert told.status == 404
            await client.until(lambda: closed(heeds) == ["a/r/1 é"])  # of the other key's run of that name nothing
            for _ in range(2):
                assert await step(client, "other", x_keepwarm_run_end="true") == 200
            await client.until(lambda: closed(heeds) == ["a/r/1 é", "a/other"])
            assert not closed(plain)
            assert await step(client, "other", x_keepwarm_run_end="soon") == 400
            async with client.session.get(f"{client.url}/metrics") as response:
                metrics = await response.text()
    assert 'keepwarm_engine_sessions_closed_total{result="closed"} 2.0' in metrics
    assert 'keepwarm_runs_ended_total{why="told"}' in metrics


async def test_a_last_request_that_failed_ends_nothing(tmp_path: Path) -> None:
    async with ScriptedEngine(info=HEEDS) as engine, gateway_for([engine], tmp_path) as client:
        assert await step(client, "r") == 200
        engine.script = Script(status=400, body={"error": {"message": "no"}})
        assert await step(client, "r", x_keepwarm_run_end="true") == 400
        engine.script = Script(body=answer("now"))
        assert await step(client, "r") == 200
        assert not closed(engine)


async def test_an_engine_that_cannot_be_told_loses_nothing(tmp_path: Path) -> None:
    async with ScriptedEngine(info=HEEDS) as engine, gateway_for([engine], tmp_path) as client:
        assert await step(client, "r", x_keepwarm_run_end="true") == 200  # its engine answers the close with 404
        await client.until(lambda: closed(engine) == ["anonymous/r"])
        await engine.close()
        async with client.session.post(f"{client.url}/keepwarm/v1/runs/r/end") as told:
            assert told.status == 200
        await engine.open()
        await client.until(lambda: client.gateway.fleet.instances["e0"].takes_requests)
        assert await step(client, "r") == 200
        assert client.at_rest()


async def test_engines_that_order_by_priority_hear_who_can_wait(tmp_path: Path) -> None:
    own_scheme = {**HEEDS, "default_priority_value": 5}
    for info, told in ((HEEDS, ["0", "0", "-1", None]), ({}, [None] * 4), (own_scheme, [None] * 4)):
        home = tmp_path / str(len(told)) / str(len(info))
        async with ScriptedEngine(info=info) as engine, gateway_for([engine], home) as client:
            for word, more in (("", {}), ("interactive", {}), ("batch", {}), ("batch", {"priority": 7})):
                async with client.chat({"x-keepwarm-priority": word}, **more) as response:
                    assert response.status == 200
            assert [asked.headers.get("x-override-priority") for asked in engine.asked] == told
            assert engine.asked[-1].json["priority"] == 7
            async with client.chat({"x-keepwarm-priority": "urgent"}) as response:
                assert response.status == 400


async def test_what_an_ended_run_held_goes_to_those_that_wait(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        instances = [{"id": "e0", "url": engine.url, "adapter": "sglang", "capacity_tokens": 1000}]
        admission = {"requests_per_instance": 4, "memory_share": 0.001, "deadline_s": 20.0, "run_idle_s": 600.0}
        async with gateway_for([engine], tmp_path, instances=instances, admission=admission) as client:
            assert await step(client, "first") == 200
            second = asyncio.create_task(step(client, "second"))
            await client.until(lambda: client.gateway.flights.count == 1)
            assert len(engine.asked) == 1  # the first run holds all that there is
            async with client.session.post(f"{client.url}/keepwarm/v1/runs/first/end") as told:
                assert told.status == 200
            assert await second == 200


async def test_an_agents_own_span_ends_its_run(tmp_path: Path) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    span = {
        "traceId": trace, "spanId": "00f067aa0ba902b7", "name": "invoke_agent x", "kind": 1,
        "startTimeUnixNano": "1790000000000000000", "endTimeUnixNano": "1790000000500000000",
        "attributes": [{"key": "keepwarm.run.end", "value": {"boolValue": True}}],
    }  # fmt: skip
    exported = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    async with ScriptedEngine(info=HEEDS) as engine, gateway_for([engine], tmp_path) as client:
        engine.script = Script(events=stream(["a"]))
        async with client.chat({"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}, stream=True) as response:
            run = response.headers["x-keepwarm-run"]
            await response.read()
        kind = {"content-type": "application/json"}
        async with client.session.post(f"{client.url}/v1/traces", data=exported, headers=kind) as told:
            assert told.status == 200
        await client.until(lambda: closed(engine) == [f"anonymous/{run}"])
