"""A long replay is folded in turns with everybody else on the event loop, and believed only when all of it is in."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from engine_adapter import turns
from engine_adapter.base import EventSource
from engine_adapter.event_socket import EventSocket, Replay
from gateway.feeds import Feed
from kvstore.events import BlocksStored, EventBatch
from kvstore.page import Tier
from radix_index.base import Knowledge
from radix_index.naive import NaiveIndex
from radix_index.source import SourceFold

BATCHES = 100


class Replays:
    """A socket on which nothing but a replay comes."""

    async def replay(self, first: int) -> Replay:
        batches = [
            EventBatch(number, 1.0 + number, (BlocksStored((number,), None, (number,) * 4, 4, Tier.DEVICE),))
            for number in range(first, BATCHES)
        ]
        return Replay(batches, BATCHES - 1)


async def test_others_have_their_turns_and_nothing_is_believed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    index = NaiveIndex()
    fold = SourceFold(index, "a", model="m", block_size=4)
    feed = Feed(EventSource("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", ""), fold, index)
    seen: list[tuple[Knowledge, Knowledge, bool, bool, int | None]] = []

    async def look() -> None:
        while True:
            told = index.match([0])["a"].knowledge
            seen.append((told, feed.knowledge, feed.is_settling, feed.state() is None, feed.next_sequence))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await feed._take(feed._resync.start(), cast("EventSocket", Replays()))
    looking.cancel()
    amid = (Knowledge.STALE, Knowledge.STALE, True, True, None)
    assert seen.count(amid) >= BATCHES - 1
    assert all(told is not Knowledge.COMPLETE for told, *_ in seen)
    assert (feed.knowledge, feed.next_sequence) == (Knowledge.COMPLETE, BATCHES)
    assert index.match([0])["a"].knowledge is Knowledge.COMPLETE
    assert index.stats().blocks == BATCHES
