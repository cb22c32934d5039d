"""One instance's KV events into the index: socket → resync → fold, and how far the result can be trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from engine_adapter.base import EventSource
from engine_adapter.event_socket import EventSocket, EventSocketOptions, Reconnected, Undecodable
from engine_adapter.turns import Turns
from kvstore.events import EventBatch
from kvstore.page import Tier
from radix_index.base import LOCAL_TIERS, Knowledge, PrefixIndex
from radix_index.resync import Resync, ResyncOptions, Step
from radix_index.snapshot import REMEMBERED_BATCHES, SourceState
from radix_index.source import SourceFold

_log = logging.getLogger(__name__)
_CONNECT_S = 2.0


class Feed:
    """Follows one source until it is cancelled. The index's knowledge of the instance is kept up to date with it.

    ``resumed``: what a snapshot knew of the source; its blocks are in the index already, and are believed once the
    source has shown that it is still in the same life and has told what came since. ``announced_tiers``: those that the
    source speaks of.
    """

    def __init__(
        self,
        source: EventSource,
        fold: SourceFold,
        index: PrefixIndex,
        *,
        announced_tiers: Collection[Tier] = LOCAL_TIERS,
        resumed: SourceState | None = None,
        on_restart: Callable[[], object] = lambda: None,
        on_cleared: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_restart`` is called when the source turns out to be in another life than before, ``on_cleared`` when it
        has emptied its caches itself: its weights may be others since."""
        self._on_restart, self._on_cleared, self._clears = on_restart, on_cleared, 0
        self._source, self._fold, self._index = source, fold, index
        self._resync = Resync(
            ResyncOptions(
                can_replay=source.replay_endpoint is not None,
                announced_tiers=frozenset(announced_tiers) - {Tier.POOL},
            )
        )
        self._shown: Knowledge | None = None
        self._is_unproved = resumed is not None
        self._is_folding = False  # many batches, one by one: the index is in between
        self._restarts = 0
        self.resets = 0
        """How often all that it had said was forgotten."""
        if resumed is not None:
            fold.resume(resumed.adapters)
            self._resync.resume(resumed.next_sequence, resumed.seen, Knowledge(resumed.knowledge))

    @property
    def knowledge(self) -> Knowledge:
        """How far what was folded can be trusted; not at all before a snapshot is proved, or amid a replay."""
        return Knowledge.STALE if self._is_unproved or self._is_folding else self._resync.knowledge

    @property
    def is_settling(self) -> bool:
        """Whether a replay is under way that will tell soon what is known."""
        return self._is_unproved or self._is_folding or self._resync.asked is not None

    @property
    def model(self) -> str:
        """The name that its blocks are known under."""
        return self._fold.model

    @property
    def waiting_blocks(self) -> int:
        """Blocks that were announced behind a parent that is not known."""
        return self._fold.orphans.blocks

    def faults(self) -> Mapping[str, int]:
        """Return how often what went wrong with its events, since it is followed."""
        stream, fold = self._resync.stats, self._fold
        return {
            "gap": stream.gaps,
            "duplicate": stream.duplicates,
            "restart": stream.restarts,
            "failed replay": stream.failed_replays,
            "not understood": stream.undecodable,
            "orphan dropped": fold.orphans.dropped_blocks,
            **{f"ignored: {reason}": count for reason, count in fold.stats.ignored.items()},
        }

    @property
    def pool(self) -> str | None:
        """The pool that it speaks of besides its own tiers."""
        return self._fold.pool

    @property
    def next_sequence(self) -> int | None:
        """The number of the next batch to fold; every earlier one is in the index. ``None`` until that is known."""
        return None if self._is_folding else self._resync.expected

    def state(self) -> SourceState | None:
        """Return what a later process needs to go on from here; ``None`` while it is in doubt what is known."""
        reached = self._resync.reached(REMEMBERED_BATCHES)
        if reached is None or self._is_unproved or self._is_folding:
            return None
        fold, (next_sequence, seen) = self._fold, reached
        # Chains that wait for their parents are not kept: what hangs on them will then be missing.
        is_complete = self._resync.knowledge is Knowledge.COMPLETE and not fold.orphans
        return SourceState(
            instance=fold.instance,
            endpoint=self._source.endpoint,
            model=fold.model,
            block_size=fold.block_size,
            pool=fold.pool,
            next_sequence=next_sequence,
            seen=seen,
            knowledge="complete" if is_complete else "partial",
            adapters=fold.adapters,
        )

    async def follow(self) -> None:
        """Fold what comes, for ever."""
        try:
            await self._follow()
        finally:
            self._fold.orphans.clear(Tier)  # others have their room

    async def _follow(self) -> None:
        options = EventSocketOptions(self._source.topic, self._source.cleared)
        async with EventSocket(self._source.endpoint, self._source.replay_endpoint, options=options) as socket:
            await socket.until_connected(_CONNECT_S)  # what is published from here on comes by itself
            await self._take(self._resync.start(), socket)
            async for arrival in socket:
                if isinstance(arrival, Reconnected):
                    step = self._resync.reconnected()
                elif isinstance(arrival, Undecodable):
                    step = self._resync.undecodable(arrival.sequence)
                else:
                    step = self._resync.receive(arrival)
                await self._take(step, socket)

    async def _take(self, step: Step, socket: EventSocket) -> None:
        while True:
            if self._resync.stats.restarts > self._restarts:
                self._restarts = self._resync.stats.restarts
                self._on_restart()
            if step.reset:
                self._reset()
            await self._apply(step.apply)
            if self._fold.stats.clears > self._clears:
                self._clears = self._fold.stats.clears
                self._on_cleared()
            if step.ask is None:
                self._is_unproved = False
                self._tell()
                return
            self._tell()
            replay = await socket.replay(step.ask)
            step = self._resync.replayed(None) if replay is None else self._resync.replayed(replay.batches, replay.last)

    async def _apply(self, batches: Sequence[EventBatch]) -> None:
        """Fold them: one at once, the thousands of a replay in turns with everybody else on the event loop."""
        if len(batches) <= 1:
            for batch in batches:
                self._fold.apply(batch)
            return
        self._is_folding = True
        self._tell()
        turns = Turns()
        for batch in batches:
            self._fold.apply(batch)
            await turns.give()
        self._is_folding = False

    def _reset(self) -> None:
        """Forget what it said. A snapshot that nothing follows on may also claim what has left its pool since."""
        self.resets += 1
        self._fold.reset(pool=self._is_unproved)
        if self._is_unproved:
            self._is_unproved = False
            _log.warning("events of %s: its replay does not reach back to the snapshot's", self._fold.instance)

    def _tell(self) -> None:
        if self.knowledge is not self._shown:
            self._shown = self.knowledge
            self._index.set_knowledge(self._fold.instance, self.knowledge)
            _log.info("events of %s: %s", self._fold.instance, self.knowledge.value)
