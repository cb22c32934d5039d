"""An instance is taken out of service under streams: they end there, or go on elsewhere at the limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import Client, gateway_for
from tests.scripted_engine import DONE, Script, ScriptedEngine, stream
from tracing.record import AttemptRole, Outcome


async def act(client: Client, action: str, root: str = "/admin/v1") -> dict[str, Any]:
    async with client.session.post(f"{client.url}{root}/instances/{action}") as response:
        assert response.status == 200, await response.text()
        told: dict[str, Any] = await response.json()
        return told


def held(gate: asyncio.Event) -> Script:
    return Script(events=stream(["one ", "two"]), pause=lambda number: gate if number == 2 else None)


@pytest.mark.parametrize("root", ["/admin/v1", "/keepwarm/v1"])
async def test_streams_end_where_they_are_and_nothing_new_comes(root: str, tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with ScriptedEngine() as one, ScriptedEngine() as two, gateway_for([one, two], tmp_path) as client:
        one.script, two.script = held(gate), Script(events=stream(["two"]))
        await act(client, "e1/drain", root)
        async with client.chat(stream=True) as response:
            await response.content.readany()
            assert (await act(client, "e0/drain", root))["draining"] is True
            await act(client, "e1/resume", root)
            for _ in range(3):
                async with client.chat(stream=True) as other:
                    assert (await other.read()).endswith(DONE)
            gate.set()
            assert (await response.read()).endswith(DONE)
        assert (len(one.asked), len(two.asked)) == (1, 3)
        records = await client.records(4)
        assert all(len(record.attempts) == 1 for record in records)


async def test_what_is_left_at_the_limit_goes_on_elsewhere(tmp_path: Path) -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, gateway_for([one, two], tmp_path) as client:
        one.script, two.script = held(asyncio.Event()), Script(events=stream(["two"], prompt=12))
        await act(client, "e1/drain")
        async with client.chat(stream=True) as response:
            first = await response.content.readany()
            await act(client, "e1/resume")
            await act(client, "e0/drain?limit_s=0.05")
            shown = first + await response.read()
        assert b"one " in shown
        assert shown.endswith(DONE)
        assert b'"error"' not in shown
        await one.until(lambda: one.hung_up == 1)
        (record,) = await client.records(1)
        assert record.outcome is Outcome.OK
        assert [(a.instance, a.role) for a in record.attempts] == [
            ("e0", AttemptRole.ANSWER), ("e1", AttemptRole.CONTINUATION)
        ]  # fmt: skip


async def test_what_cannot_go_on_is_told_so_and_has_a_row(tmp_path: Path) -> None:
    async with ScriptedEngine() as one, gateway_for([one], tmp_path) as client:
        one.script = held(asyncio.Event())
        async with client.chat(stream=True) as response:
            await response.content.readany()
            await act(client, "e0/drain?limit_s=0")
            assert b'"error"' in await response.read()
        (record,) = await client.records(1)
        assert record.outcome is Outcome.TRUNCATED
        await act(client, "e0/resume")
        one.script = Script(events=stream(["well"]))
        async with client.chat(stream=True) as response:  # its breaker holds nothing against it
            assert response.status == 200


async def test_a_drain_that_is_taken_back_breaks_nothing_off(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with ScriptedEngine() as one, gateway_for([one], tmp_path) as client:
        one.script = held(gate)
        async with client.chat(stream=True) as response:
            await response.content.readany()
            await act(client, "e0/drain?limit_s=0.1")
            await act(client, "e0/resume")
            asyncio.get_running_loop().call_later(0.2, gate.set)
            assert (await response.read()).endswith(DONE)


@pytest.mark.parametrize("limit", ["soon", "-1", "nan", "1e9"])
async def test_a_limit_that_is_none_is_refused(limit: str, tmp_path: Path) -> None:
    async with ScriptedEngine() as one, gateway_for([one], tmp_path) as client:
        async with client.session.post(f"{client.url}/admin/v1/instances/e0/drain?limit_s={limit}") as response:
            assert response.status == 400
        assert client.gateway.fleet.instances["e0"].takes_requests
