"""Clients that leave at random points leave nothing behind; ``tests.e2e.aborts`` does it ten thousand times."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.aborts import passed, storm
from tests.gateways import gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer
from tracing.record import Outcome


@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_that_leave_leave_nothing(seed: int, tmp_path: Path) -> None:
    found = await storm(tmp_path, 250, seed)
    assert passed(found), found
    assert {"ok", "aborted"} <= found["outcomes"].keys()  # on a slow machine few get as far as to be cut
    assert {"1", "2"} <= found["attempts"].keys()


@pytest.mark.parametrize("header", [b"x-any: 1", b"te: trailers"], ids=["front", "aiohttp"])
async def test_a_client_that_takes_nothing_of_whole_answers_holds_no_place(header: bytes, tmp_path: Path) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    ask = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%b\r\ncontent-length: %d\r\n\r\n%b"
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, stream={"client_stall_s": 0.1}) as client,
    ):
        engine.script = Script(body=answer("x" * (32 << 20)))
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(ask % (header, len(body), body) * 2)  # the front is rid of the first one, and waits with the next
        await client.until(lambda: bool(client.stored()) and client.stored()[-1].outcome is Outcome.ABORTED)
        assert client.at_rest()
        writer.close()
