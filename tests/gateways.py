"""A whole gateway in a test's own event loop, over real HTTP, and what it wrote down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from billing.row import LedgerRow
from gateway.app import Gateway, running
from gateway.settings import load_settings
from tests.scripted_engine import ScriptedEngine
from tracing.record import RequestRecord

Json = dict[str, Any]


class Client:
    """A plain HTTP client and the gateway that it speaks to."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self.gateway, self.session, self.url = gateway, session, gateway.url

    def chat(self, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """Return aiohttp's context manager of a chat completion."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
        return self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    async def records(self, count: int) -> list[RequestRecord]:
        """Return the trace store's records, newest last, once there are so many, and check them against the ledger."""
        ledger = self.gateway.ledger
        await self.until(lambda: not self.gateway.flights.count and len(self.stored()) >= count)
        found = self.stored()
        assert len(found) == count
        assert await asyncio.to_thread(ledger.flush, 5.0)
        rows = {row.request_id: row for row in ledger.rows()}
        assert len(rows) == count
        for record in found:
            _agree(record, rows[record.request_id])
        return found

    async def record(self, request_id: str) -> RequestRecord:
        """Return one request's record once it is stored, after comparing it with its ledger row."""
        await self.until(lambda: any(record.request_id == request_id for record in self.stored()))
        assert await asyncio.to_thread(self.gateway.ledger.flush, 5.0)
        (record,) = (record for record in self.stored() if record.request_id == request_id)
        (row,) = (row for row in self.gateway.ledger.rows() if row.request_id == request_id)
        _agree(record, row)
        return record

    async def until(self, condition: Callable[[], bool], *, limit_s: float = 10) -> None:
        """Wait until something is so that nobody tells."""
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - there is nothing to wait on
                await asyncio.sleep(0.01)

    def stored(self) -> list[RequestRecord]:
        """Return what the trace store holds, oldest first."""
        assert self.gateway.traces.flush(5.0)
        return sorted(self.gateway.traces.recent(1000), key=lambda record: record.stamps.arrived_ns)

    def at_rest(self) -> bool:
        """Tell whether nothing is in flight and every reservation was given back."""
        loads = [instance.load for instance in self.gateway.fleet.instances.values()]
        return not self.gateway.flights.count and all(not load.running and not load.queued_tokens for load in loads)


def _agree(record: RequestRecord, row: LedgerRow) -> None:
    assert row.amount_nano == record.charge.amount_nano
    assert row.usage() == record.usage


@asynccontextmanager
async def gateway_for(
    engines: Sequence[ScriptedEngine],
    home: Path,
    *,
    ready_count: int | None = None,
    ready_limit_s: float = 60,
    **settings: Any,
) -> AsyncIterator[Client]:
    """Be a gateway in front of these engines, called ``e0``, ``e1`` …, once so many of them are up (default: all)."""
    instances = [{"id": f"e{n}", "url": engine.url, "adapter": "sglang"} for n, engine in enumerate(engines)]
    flags = {
        "home": str(home),
        "server": {"port": 0, **settings.pop("server", {})},
        "instances": settings.pop("instances", instances),
        "health": {"interval_s": 0.05, "timeout_s": 2.0},
        **settings,
    }
    async with running(load_settings(flags=flags, environment={})) as gateway, aiohttp.ClientSession() as session:
        async with asyncio.timeout(ready_limit_s):
            await gateway.fleet.until_ready(len(engines) if ready_count is None else ready_count)
        yield Client(gateway, session)
