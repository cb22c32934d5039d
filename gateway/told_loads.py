"""What engines themselves say of their load: it holds what came past this gateway, too.

Where an engine pushes its load it is listened to, else it is asked, as often as it is probed. What it said is kept with
the time at which it said it, so that whoever uses it can see how old it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_adapter.base import EngineAdapter, LoadSignal
from engine_adapter.errors import UpstreamError
from engine_adapter.http import UpstreamClient, get_bytes
from engine_adapter.load import EngineLoad, LoadSource
from engine_adapter.load_socket import pushed_loads

_AGAIN_S = 60.0
"""After this long an engine that could not be asked is asked again: its metrics may have been off."""


@dataclass(slots=True)
class ToldLoad:
    """The newest word of one instance."""

    load: EngineLoad | None = None
    told_s: float = 0.0  # of ``time.monotonic``

    def take(self, load: EngineLoad) -> None:
        """Keep it."""
        self.load, self.told_s = load, time.monotonic()


@dataclass(frozen=True, slots=True)
class LoadTeller:
    """Where one instance tells its load. ``rank``: which one's is wanted, where a server has several."""

    adapter: EngineAdapter
    url: str
    headers: Mapping[str, str]
    signal: LoadSignal
    sources: Sequence[LoadSource] = ()
    rank: int | None = None


async def follow_load(teller: LoadTeller, told: ToldLoad, client: UpstreamClient, interval_s: float) -> None:
    """Keep ``told`` up to date until cancelled. Never raises for what an engine says, or doesn't."""
    source = next((each for each in teller.sources if each.rank == (teller.rank or 0)), None)
    if teller.signal is LoadSignal.PUSH and source is not None:
        async for load in pushed_loads(source):
            told.take(load)
    while teller.signal is not LoadSignal.NONE:
        answer = await _asked(teller, client)
        if answer is not None:
            told.take(answer)
        await asyncio.sleep(interval_s if answer is not None else _AGAIN_S)


async def _asked(teller: LoadTeller, client: UpstreamClient) -> EngineLoad | None:
    for path in teller.adapter.load_paths:
        try:
            body = await get_bytes(client, f"{teller.url}{path}", teller.headers)
        except UpstreamError:
            continue
        loads = teller.adapter.read_load(body)
        for load in loads:
            if teller.rank is None or load.rank == teller.rank:
                return load
    return None
