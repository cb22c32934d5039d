"""A gateway that is killed in the middle of traffic, before a real engine whose cache goes on changing.

The gateway that comes next knows of the index what the file and the engine's replay tell. Every prediction of it that
it calls exact must be what the engine reports, and it must call them exact again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_adapter.embedded.launch import free_port
from engine_adapter.event_socket import EventSocket
from tests.embedded_engines import engines

pytestmark = pytest.mark.model

Json = dict[str, Any]
MODEL = "SmolLM2-135M-Instruct"
LIMIT_S = 60


def talk(name: str, turns: int) -> list[Json]:
    """Return a conversation whose beginnings others of that name share."""
    text = f"{name} keeps an order desk and answers in one short sentence. " * 6
    rest = [{"role": "user", "content": f"Turn {turn}: how many of item {turn * 7} are left?"} for turn in range(turns)]
    return [{"role": "system", "content": text}, *rest]


class GatewayProcess:
    """``keepwarm serve`` before one engine."""

    def __init__(self, engine: str, home: Path, session: aiohttp.ClientSession) -> None:
        self._home, self._session, port = home, session, free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._settings = home / "keepwarm.toml"
        self._settings.write_text(
            f'home = "{home}"\n[server]\nport = {port}\n[routing]\nindex_snapshot_s = 0.2\n'
            f'[[instances]]\nid = "e"\nurl = "{engine}"\nadapter = "embedded"\n'
        )
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self._home / "gateway.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "serve", "--config", str(self._settings), stdout=log, stderr=log
            )

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def instance(self) -> Json | None:
        try:
            async with self._session.get(f"{self.url}/keepwarm/v1/instances") as response:
                found: Json = (await response.json())["instances"][0]
                return found
        except aiohttp.ClientError:
            return None

    async def until_settled(self, engine: str) -> None:
        """Wait until it knows all that the engine has published."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                instance, published = await self.instance(), await batches(self._session, engine)
                if instance and instance["events"] == "complete" and instance["next_event_batch"] == published:
                    return
                await asyncio.sleep(0.05)

    async def hits(self, messages: list[Json]) -> tuple[int, int, bool]:
        """Send a conversation; return the predicted and the reported hits, and whether that was called exact."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 3, "temperature": 0}
        async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            cached = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
            request_id, run_id = response.headers["x-keepwarm-request-id"], response.headers["x-keepwarm-run"]
        async with asyncio.timeout(LIMIT_S):
            while True:
                async with self._session.get(f"{self.url}/keepwarm/v1/runs/{run_id}") as response:
                    records = (await response.json()).get("records", [])
                for record in records:
                    if record["request_id"] == request_id:
                        decision = record["decision"]
                        return decision["predicted_hit_tokens"], cached, decision["exact"]
                await asyncio.sleep(0.05)


async def batches(session: aiohttp.ClientSession, engine: str) -> int:
    """Return how many batches of events an engine has published."""
    async with session.get(f"{engine}/server_info") as response:
        events = (await response.json())["kv_events"]
    socket = EventSocket("", f"tcp://127.0.0.1:{events['replay_endpoint_port_base']}")
    published = await socket.replay(0)
    assert published is not None
    return 0 if published.last is None else published.last + 1


async def direct(session: aiohttp.ClientSession, engine: str, messages: list[Json]) -> None:
    """Use the engine behind the gateway's back."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    async with session.post(f"{engine}/v1/chat/completions", json=body) as response:
        assert response.status == 200


async def test_the_next_gateway_is_exact_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    async with engines(tmp_path, 1) as (engine,), aiohttp.ClientSession() as session:
        gateway = GatewayProcess(engine, home, session)
        try:
            await gateway.start()
            await gateway.until_settled(engine)
            for turns in range(1, 4):
                await gateway.hits(talk("Ada", turns))
            async with asyncio.timeout(LIMIT_S):
                while not (home / "index.snapshot").exists():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)
            in_flight = [asyncio.create_task(gateway.hits(talk(name, 3))) for name in ("Bob", "Cleo", "Dan")]
            await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
            await gateway.kill()
            await asyncio.gather(*in_flight, return_exceptions=True)
            await direct(session, engine, talk("Eve", 4))  # whom no gateway ever saw
            await gateway.start()
            await direct(session, engine, talk("Eve", 5))
            await gateway.until_settled(engine)
            seen = []
            for messages in (talk("Ada", 3), talk("Ada", 4), talk("Cleo", 3), talk("Eve", 5), talk("Eve", 6)):
                seen.append(await gateway.hits(messages))
                await gateway.until_settled(engine)
        finally:
            await gateway.kill()
    log = (home / "gateway.log").read_text()
    assert "the index begins with" in log
    assert [(predicted, exact) for predicted, _, exact in seen] == [(reported, True) for _, reported, _ in seen]
    assert all(reported > 100 for _, reported, _ in seen), seen
