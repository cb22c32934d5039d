"""What an engine says of its load reaches the gateway: asked over HTTP, or pushed over a real ZMQ socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from engine_adapter.base import LoadSignal
from engine_adapter.load import EngineLoad, LoadSource
from engine_adapter.named import ADAPTERS
from engine_adapter.wire_client import WireClient
from gateway.told_loads import LoadTeller, ToldLoad, follow_load


class Metrics:
    """A metrics page of vLLM with two ranks, and how often it was asked for."""

    def __init__(self) -> None:
        self.asked, self.waiting, self.status = 0, 3, 200
        self.url = ""

    async def page(self, request: web.Request) -> web.Response:
        self.asked += 1
        lines = [
            f'vllm:num_requests_{name}{{engine="{rank}"}} {value}'
            for rank in (0, 1)
            for name, value in (("running", rank), ("waiting", self.waiting))
        ]
        return web.Response(status=self.status, text="\n".join(lines) + "\n")


@pytest.fixture
async def metrics() -> AsyncIterator[Metrics]:
    served, app = Metrics(), web.Application()
    app.router.add_get("/metrics", served.page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


async def _until(load: EngineLoad, told: ToldLoad) -> None:
    async with asyncio.timeout(30):
        while told.load != load:  # noqa: ASYNC110 - a value, told by no event
            await asyncio.sleep(0)


async def test_an_engine_is_asked_again_and_again(metrics: Metrics) -> None:
    told = ToldLoad()
    teller = LoadTeller(ADAPTERS["vllm"], metrics.url, {}, LoadSignal.SCRAPE, rank=1)
    async with WireClient() as client:
        task = asyncio.create_task(follow_load(teller, told, client, 0.0))
        await _until(EngineLoad(1, 3, rank=1), told)
        metrics.waiting = 0
        await _until(EngineLoad(1, 0, rank=1), told)
        task.cancel()


async def test_one_that_does_not_tell_is_left_in_peace(metrics: Metrics) -> None:
    metrics.status, told = 404, ToldLoad()
    async with WireClient() as client:
        quiet = LoadTeller(ADAPTERS["openai"], metrics.url, {}, LoadSignal.NONE)
        await follow_load(quiet, told, client, 0.0)
        teller = LoadTeller(ADAPTERS["vllm"], metrics.url, {}, LoadSignal.SCRAPE)
        task = asyncio.create_task(follow_load(teller, told, client, 0.0))
        async with asyncio.timeout(30):
            while not metrics.asked:  # noqa: ASYNC110 - another task
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (metrics.asked, told.load) == (1, None)
        task.cancel()


async def test_what_is_pushed_is_taken() -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    sources = (LoadSource("tcp://127.0.0.1:1", "load", 1), LoadSource(f"tcp://127.0.0.1:{port}", "load", 0))
    told = ToldLoad()
    teller = LoadTeller(ADAPTERS["sglang"], "http://127.0.0.1:1", {}, LoadSignal.PUSH, sources)
    payload = msgspec.msgpack.encode(["LoadStat", 3, 2, 50, 100, 0, 700])
    async with WireClient() as client:
        task = asyncio.create_task(follow_load(teller, told, client, 0.0))
        async with asyncio.timeout(30):
            while told.load is None:
                await publisher.send_multipart([b"load", bytes(8), b"odd"])
                await publisher.send_multipart([b"load", bytes(8), payload])
                await asyncio.sleep(0)
        assert told.load == EngineLoad(3, 2, 0.5, 700)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    publisher.close(0)
    context.destroy(0)
