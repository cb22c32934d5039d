"""A gateway whose traces are in PostgreSQL: the console, the commands and ``check`` read them there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.cli import main
from tests.gateways import gateway_for
from tests.samples.postgres import Server, running
from tests.scripted_engine import ScriptedEngine


async def test_traces_of_two_gateways_are_one_store(
    tmp_path: Path, postgres: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.database()
    tracing = {"url": url}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path / "one", tracing=tracing) as one,
        gateway_for([engine], tmp_path / "two", tracing=tracing) as two,
    ):
        for client, run in ((one, "run-a"), (two, "run-b")):
            for _ in range(2):
                async with client.chat({"x-keepwarm-run": run}) as response:
                    assert response.status == 200
        for client in (one, two):
            await client.until(lambda client=client: client.gateway.traces.flush(5.0))
        assert [record.link.run_id for record in one.stored() if record.link] == ["run-a", "run-a", "run-b", "run-b"]
        async with one.session.get(f"{one.url}/console/runs") as response:
            page = await response.text()
        assert response.status == 200
        assert "run-a" in page
        assert "run-b" in page
        async with two.session.get(f"{two.url}/console/runs/run-a") as response:
            assert response.status == 200
    settings = tmp_path / "keepwarm.toml"
    settings.write_text(f'home = "{tmp_path}/one"\n[tracing]\nurl = "{url}"\n')

    def says(*words: str) -> str:
        assert main([*words]) == 0
        return capsys.readouterr().out

    capsys.readouterr()
    shown = await asyncio.to_thread(says, "trace", "--config", str(settings), "list")
    assert "run-a" in shown
    assert "run-b" in shown
    assert shown == await asyncio.to_thread(says, "trace", "--store", url, "list")
    assert "2 steps" in await asyncio.to_thread(says, "doctor", "run-b", "--config", str(settings))
    await asyncio.to_thread(says, "attribution", "--config", str(settings))


async def test_requests_are_served_while_the_traces_are_away(tmp_path: Path) -> None:
    with running() as server:
        async with (
            ScriptedEngine() as engine,
            gateway_for([engine], tmp_path, tracing={"url": server.database()}) as one,
        ):
            assert await asyncio.to_thread(one.gateway.traces.flush, 30.0)
            server.kill()
            try:
                async with one.chat({"x-keepwarm-run": "meanwhile"}) as response:
                    assert response.status == 200
                async with one.session.get(f"{one.url}/console/runs") as response:
                    assert response.status == 503
                    assert "served meanwhile" in await response.text()
            finally:
                await asyncio.to_thread(server.start)
            while not await asyncio.to_thread(one.gateway.traces.flush, 30.0):
                pass
            async with one.session.get(f"{one.url}/console/runs/meanwhile") as response:
                assert response.status == 200


def test_check_tells_whether_the_traces_are_there(
    tmp_path: Path, postgres: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    path, url = tmp_path / "keepwarm.toml", postgres.database()
    start = f'home = "{tmp_path}/home"\n[server]\nport = 0\n[tracing]\n'
    path.write_text(f'{start}url = "{url}"\n')
    assert main(["check", "--config", str(path)]) == 0
    assert "no tables yet: the first start makes them" in capsys.readouterr().out
    for wrong in (url.replace("/t", "/nobody", 1), "mysql://host/db"):
        path.write_text(f'{start}url = "{wrong}"\n')
        assert main(["check", "--config", str(path)]) == 1
        assert "FAIL traces" in capsys.readouterr().err
    path.write_text(f'{start}url = "{url}"\nstore = "x"\n')
    assert main(["check", "--config", str(path)]) == 1
    assert "two trace stores" in capsys.readouterr().err
