"""The stream of a live page over HTTP: each tenant its own, until its key ends or the gateway goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from gateway.console.live import LiveOptions
from gateway.console.visitor import Visitor
from gateway.errors import Unauthorized
from tests.samples.agent_runs import RunShape, agent_run
from tests.samples.console import console_app, visitor
from tracing.store import TraceStore, TraceStoreOptions

LIVE = LiveOptions(tick_s=0.005, clients=2, heartbeat_s=0.02)


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[TraceStore]:
    store = TraceStore(tmp_path / "t.sqlite3", TraceStoreOptions(max_age_ns=None))
    for tenant in ("a", "b"):
        records = agent_run(RunShape(run_id="nightly", tenant=tenant, steps=2, agent=f"of-{tenant}"))
        assert store.keep([replace(record, request_id=f"{tenant}-{record.request_id}") for record in records], 30)
    yield store
    store.close()


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, dict[str, str]]]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_a_tenant_hears_of_its_own_run_of_a_name_that_two_chose(traces: TraceStore) -> None:
    app = console_app(traces, visitor("a"), live=LIVE)
    async with asyncio.timeout(30), TestClient(TestServer(app)) as client:
        answer = await client.get("/console/live?view=run&run=nightly&tenant=b")
        assert answer.content_type == "text/event-stream"
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        first = await anext(events(answer))
        assert {"step-1", "step-2"} <= first["added"].keys()
        told = json.dumps(first)
        assert "a-nightly-001" in told
        assert "b-nightly-001" not in told
        assert "tenant=b" not in told
        assert "/console/runs/nightly/diff?a=1&amp;b=2&amp;tenant=a" in first["added"]["step-2"]


async def test_a_page_is_told_of_the_steps_that_it_lacks(traces: TraceStore) -> None:
    async with asyncio.timeout(30), TestClient(TestServer(console_app(traces, visitor("a"), live=LIVE))) as client:
        first = await client.get("/console/live?view=run&run=nightly")
        await anext(events(first))
        late = await client.get("/console/live?view=run&run=nightly&after=1")
        told = await anext(events(late))
        assert "step-1" not in told["added"]
        assert "step-2" in told["added"]


async def test_a_key_that_is_revoked_hears_nothing_more(traces: TraceStore) -> None:
    is_good = True

    def visitor_of(_: web.Request) -> Visitor:
        if not is_good:
            raise Unauthorized("gone")
        return visitor("a")

    app = console_app(traces, visitor_of=visitor_of, live=LIVE)
    async with asyncio.timeout(30), TestClient(TestServer(app)) as client:
        answer = await client.get("/console/live?window=15m")
        await anext(events(answer))
        is_good = False
        await answer.content.read()  # to its end


async def test_all_streams_end_with_the_gateway_and_no_more_begin_than_may(traces: TraceStore) -> None:
    is_leaving = False
    app = console_app(traces, visitor(), is_leaving=lambda: is_leaving, live=LIVE)
    async with asyncio.timeout(30), TestClient(TestServer(app)) as client:
        answers = [await client.get("/console/live") for _ in range(2)]
        assert (await client.get("/console/live")).status == 503
        await anext(events(answers[0]))
        is_leaving = True
        for answer in answers:
            await answer.content.read()
        assert (await client.get("/console/live")).status == 503
