"""One instance's KV events into the index: socket → resync → fold, and how far the result can be trusted."""

from __future__ import annotations

import logging

from engine_adapter.base import EventSource
from engine_adapter.event_socket import EventSocket, EventSocketOptions, Reconnected, Undecodable
from radix_index.base import Knowledge, PrefixIndex
from radix_index.resync import Resync, ResyncOptions, Step
from radix_index.source import SourceFold

_log = logging.getLogger(__name__)


class Feed:
    """Follows one source until it is cancelled. The index's knowledge of the instance is kept up to date with it."""

    def __init__(self, source: EventSource, fold: SourceFold, index: PrefixIndex) -> None:
        self._source, self._fold, self._index = source, fold, index
        self._resync = Resync(ResyncOptions(can_replay=source.replay_endpoint is not None))
        self._shown: Knowledge | None = None

    @property
    def knowledge(self) -> Knowledge:
        """How far what was folded can be trusted."""
        return self._resync.knowledge

    @property
    def next_sequence(self) -> int | None:
        """The number of the next batch to fold; every earlier one is in the index. ``None`` until that is known."""
        return self._resync.expected

    async def follow(self) -> None:
        """Fold what comes, for ever."""
        options = EventSocketOptions(topic=self._source.topic)
        async with EventSocket(self._source.endpoint, self._source.replay_endpoint, options=options) as socket:
            await self._take(self._resync.start(), socket)
            async for arrival in socket:
                if isinstance(arrival, Reconnected):
                    step = self._resync.reconnected()
                elif isinstance(arrival, Undecodable):
                    step = self._resync.undecodable()
                else:
                    step = self._resync.receive(arrival)
                await self._take(step, socket)

    async def _take(self, step: Step, socket: EventSocket) -> None:
        while True:
            if step.reset:
                self._fold.reset()
            for batch in step.apply:
                self._fold.apply(batch)
            self._tell()
            if step.ask is None:
                return
            step = self._resync.replayed(await socket.replay(step.ask))

    def _tell(self) -> None:
        knowledge = self._resync.knowledge
        if knowledge is not self._shown:
            self._shown = knowledge
            self._index.set_knowledge(self._fold.instance, knowledge)
            _log.info("events of %s: %s", self._fold.instance, knowledge.value)
