"""One gateway of several processes, as users start it: what one knows the others know, and none is missed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from billing.ledger_read import LedgerReader
from engine_adapter.embedded.launch import free_port
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer, event, stream
from tests.scripted_engine import chunk as piece
from tracing.store import TraceStore

ROOT = Path(__file__).parents[2]
WORKERS = 3
AS_ROOT = {"x-api-key": "sk-root"}
SETTINGS = """
home = "{home}"
[server]
port = {port}
workers = {workers}
drain_limit_s = {drain_s}
[log]
access = false
[health]
interval_s = 0.2
[[keys]]
id = "root"
secret = "sk-root"
admin = true
[[keys]]
id = "few"
secret = "sk-few"
[[keys]]
id = "narrow"
secret = "sk-narrow"
[[limits]]
key = "few"
requests_per_minute = 20
[[limits]]
key = "narrow"
concurrency = 4
[[models]]
name = "m"
tokenizer = "none"
[[instances]]
id = "e0"
url = "{engine}"
adapter = "openai"
models = ["m"]
"""


@dataclass
class Several:
    """A gateway of several workers, asked over a new connection each time, so that any worker may answer."""

    process: subprocess.Popen[bytes]
    url: str
    home: Path
    engine: ScriptedEngine
    log: Path

    @asynccontextmanager
    async def ask(self, method: str, path: str, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        async with (
            aiohttp.ClientSession(headers={"connection": "keep-alive"}) as session,
            session.request(method, self.url + path, **more) as response,
        ):
            yield response

    async def chat(self, secret: str = "sk-root", **body: Any) -> tuple[int, dict[str, str], Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
        headers = {"authorization": f"Bearer {secret}"}
        async with self.ask("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.json()

    async def metrics(self) -> dict[str, float]:
        """Return samples by name, summed over labels."""
        async with self.ask("GET", "/metrics") as response:
            text = await response.text()
        sums: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def pids(self) -> dict[int, int]:
        """Return the workers' processes that have left counters."""
        named = [path.name.split("-") for path in (self.home / "workers").glob("[0-9]*-*")]
        return {int(number): int(pid) for number, pid in named}

    async def until(self, condition: Any, limit_s: float = 120) -> None:
        async with asyncio.timeout(limit_s):
            while not await condition():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)

    async def all_serve(self) -> None:
        """Wait until every worker has begun, and its engine is up."""

        async def ready() -> bool:
            if len(self.pids()) < WORKERS:
                return False
            for _ in range(4 * WORKERS):
                async with self.ask("GET", "/readyz") as response:
                    if response.status != 200:
                        return False
            return True

        await self.until(ready)


@asynccontextmanager
async def several(home: Path, *, drain_s: float = 20) -> AsyncIterator[Several]:
    port, config, log = free_port(), home / "keepwarm.toml", home / "log"
    async with ScriptedEngine() as engine:
        text = SETTINGS.format(home=home / "home", port=port, workers=WORKERS, engine=engine.url, drain_s=drain_s)
        config.write_text(text)
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, "-m", "gateway", "serve", "--config", str(config)],
                cwd=ROOT, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        one = Several(process, f"http://127.0.0.1:{port}", home / "home", engine, log)
        try:
            await one.all_serve()
            yield one
        except BaseException:
            print(log.read_text()[-4000:])
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    await asyncio.to_thread(process.wait, 30)
                except subprocess.TimeoutExpired:
                    process.kill()


def replying(asked: Asked) -> Script:
    """Answer with how many messages there were: a conversation goes on from its own answers alone."""
    return Script(body=answer(f"reply to {len(asked.json['messages'])} of {asked.json['messages'][0]['content']}"))


async def test_what_one_worker_knows_all_know(tmp_path: Path) -> None:
    async with several(tmp_path) as gateway:
        gateway.engine.script_for = replying

        async def run_of(agent: int) -> set[str]:
            messages: list[Any] = [{"role": "user", "content": f"task {agent}"}]
            runs = set()
            for number in range(1, 9):
                status, headers, body = await gateway.chat(messages=messages)
                assert (status, headers["x-keepwarm-step"]) == (200, str(number))
                runs.add(headers["x-keepwarm-run"])
                messages += [body["choices"][0]["message"], {"role": "user", "content": f"go on {number}"}]
            return runs

        runs = await asyncio.gather(*(run_of(agent) for agent in range(6)))
        assert [len(found) for found in runs] == [1] * 6
        assert len(set.union(*runs)) == 6

        answered = [(await gateway.chat("sk-few"))[0] for _ in range(45)]
        assert answered.count(200) in (20, 40)  # 40: the minute changed under way
        assert answered[19] == 200

        asked = 6 * 8 + 45
        for _ in range(6):  # whoever answers
            found = await gateway.metrics()
            assert found["keepwarm_requests_total"] <= asked

        async def counted() -> bool:
            found = await gateway.metrics()
            return found["keepwarm_requests_total"] == asked == found.get("keepwarm_ledger_requests_total", 0)

        await gateway.until(counted)
        assert (await gateway.metrics())["keepwarm_instance_running"] == 0
        parts = [json.loads(path.read_bytes()) for path in (gateway.home / "workers").glob("[0-9]*-*")]
        busy = [part for part in parts if any(f[0] == "keepwarm_requests" and f[3] for f in part)]
        assert len(busy) >= 2  # the kernel dealt connections to several

        _, made = await key_made(gateway)

        async def all_answer(status: int) -> bool:
            return [(await gateway.chat(made))[0] for _ in range(12)] == [status] * 12

        await gateway.until(lambda: all_answer(200))
        async with gateway.ask("POST", "/admin/v1/keys/agent/revoke", headers=AS_ROOT) as response:
            assert response.status == 200
        await gateway.until(lambda: all_answer(401))

        async with gateway.ask("POST", "/keepwarm/v1/instances/e0/drain", headers=AS_ROOT) as response:
            assert response.status == 200
        assert {(await gateway.chat())[0] for _ in range(12)} == {503}
    assert gateway.process.returncode == 0
    with LedgerReader(gateway.home / "ledger.sqlite3") as reader:
        rows = list(reader.rows())
    traces = TraceStore(gateway.home / "traces.sqlite3", read_only=True)
    assert {row.request_id for row in rows} == {record.request_id for record in traces.recent(1000)}
    traces.close()
    assert not (gateway.home / "workers").exists()


async def key_made(gateway: Several) -> tuple[int, str]:
    async with gateway.ask("POST", "/admin/v1/keys", json={"id": "agent"}, headers=AS_ROOT) as response:
        return response.status, (await response.json())["secret"]


async def test_a_worker_that_is_killed_is_replaced_and_what_it_held_is_free(tmp_path: Path) -> None:
    async with several(tmp_path) as gateway:
        go_on = asyncio.Event()
        for _ in range(20):
            assert (await gateway.chat())[0] == 200
        before = (await gateway.metrics())["keepwarm_requests_total"]
        gateway.engine.script = Script(body=answer("x"), wait_for=go_on)
        held = [asyncio.create_task(gateway.chat("sk-narrow")) for _ in range(4)]
        await gateway.engine.until(lambda: len(gateway.engine.asked) == 24)
        assert (await gateway.chat("sk-narrow"))[0] == 429
        old = gateway.pids()
        for pid in old.values():
            os.kill(pid, signal.SIGKILL)
        await asyncio.wait(held)
        assert all(task.exception() is not None for task in held)  # their connections broke

        async def replaced() -> bool:
            return len(gateway.pids()) == WORKERS and not set(gateway.pids().values()) & set(old.values())

        await gateway.until(replaced)
        await gateway.all_serve()
        go_on.set()
        assert [(await gateway.chat("sk-narrow"))[0] for _ in range(4)] == [200] * 4
        found = await gateway.metrics()
        assert found["keepwarm_requests_total"] >= before  # what dead ones counted still counts
        assert found["keepwarm_in_flight"] == 0

        async def told() -> bool:  # the four that died with their workers have their rows
            return (await gateway.metrics())["keepwarm_ledger_requests_total"] >= 20 + 4 + 4

        await gateway.until(told)


@pytest.mark.requirement("R25")
async def test_sigterm_lets_streams_of_all_workers_finish_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    async with several(tmp_path) as gateway:
        go_on = asyncio.Event()
        begun = stream(["a", "b"])
        gateway.engine.script = Script(events=begun, pause=lambda number: go_on if number == 2 else None)

        async def streamed() -> bytes:
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            async with gateway.ask("POST", "/v1/chat/completions", json=body, headers=AS_ROOT) as response:
                return await response.read()

        streams = [asyncio.create_task(streamed()) for _ in range(8)]
        await gateway.engine.until(lambda: len(gateway.engine.asked) == 8)
        gateway.process.send_signal(signal.SIGTERM)

        async def refused() -> bool:
            try:
                async with gateway.ask("GET", "/readyz") as response:
                    return response.status == 503
            except aiohttp.ClientConnectionError:
                return True

        await gateway.until(refused)
        go_on.set()
        for body in await asyncio.gather(*streams):
            assert body.count(b"data: [DONE]") == 1
        assert await asyncio.to_thread(gateway.process.wait, 30) == 0
    with LedgerReader(gateway.home / "ledger.sqlite3") as reader:
        assert [row.outcome for row in reader.rows()] == ["ok"] * 8

    second = tmp_path / "second"
    second.mkdir()
    async with several(second) as gateway:
        gateway.engine.script = Script(events=[event(piece({"content": "x"}))], end="hang")
        task = asyncio.create_task(gateway.chat(stream=True))
        await gateway.engine.until(lambda: len(gateway.engine.asked) == 1)
        pids = gateway.pids()
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.until(refused)
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.process.wait, 30) == 130
        await asyncio.wait({task})
        for pid in pids.values():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_gateway_that_cannot_start_says_why_once_and_ends(tmp_path: Path) -> None:
    config = tmp_path / "keepwarm.toml"
    text = SETTINGS.format(home=tmp_path, port=0, workers=2, engine="http://127.0.0.1:9", drain_s=1)
    config.write_text(text + '[billing]\nprices = "missing.toml"\n')
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--config", str(config)],
        cwd=ROOT, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.count(b"keepwarm serve:") == 1
    assert b"missing.toml" in ended.stderr
