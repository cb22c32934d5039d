"""When to believe a stream of numbered batches: gaps, replays, restarts. Sans I/O.

A publisher numbers its batches from 0 in each life and keeps the last few thousand for replay. It has no epoch number,
a subscriber may join late, and a frame can be lost. ``Resync`` decides, for every frame that arrives, what may be
applied; the caller does the I/O:

    step = resync.receive(batch)          # or .start(), .reconnected(), .undecodable(number), .replayed(batches, last)
    if step.reset: fold.reset()
    for batch in step.apply: fold.apply(batch)
    if step.ask is not None: fetch the batches from number step.ask on, then call resync.replayed(them, or None)

While batches are missing the state is ``STALE`` and what comes later is held back. A batch that came and could not be
understood is missing like any other, also when it is the last one. A replay is asked from one batch
*before* the first missing one: only if that batch is the one that we know is it still the same life, otherwise the
publisher has restarted behind our back and everything it said before is void.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.events import EventBatch, TierCleared
from kvstore.page import Tier
from radix_index.base import LOCAL_TIERS, Knowledge


@dataclass(frozen=True, slots=True)
class ResyncOptions:
    """Limits. ``can_replay`` is false for a publisher without a replay socket.

    ``announced_tiers`` are those that the source speaks of: a clearing of all of them leaves nothing unknown.
    """

    can_replay: bool = True
    announced_tiers: frozenset[Tier] = frozenset(LOCAL_TIERS)
    hold_batches: int = 20_000
    remember_batches: int = 4_096
    asks: int = 3


@dataclass(frozen=True, slots=True)
class Step:
    """What the caller must do now, in this order."""

    reset: bool = False
    apply: tuple[EventBatch, ...] = ()
    ask: int | None = None


@dataclass(slots=True)
class ResyncStats:
    """Counters since the source was added."""

    gaps: int = 0
    duplicates: int = 0
    restarts: int = 0
    replays: int = 0
    failed_replays: int = 0
    undecodable: int = 0


class Resync:
    """The state of one source's stream. Memory is bounded by ``options``; every call is O(batches it releases)."""

    def __init__(self, options: ResyncOptions = ResyncOptions()) -> None:
        self.options = options
        self.stats = ResyncStats()
        self.knowledge = self._knowledge_before = Knowledge.PARTIAL
        self.asked: int | None = None  # the replay that is under way
        self.expected: int | None = None  # the next number to apply; None: whatever comes next
        self._told = -1  # the last number that is known to have been published, though perhaps not understood
        self._asks_left = options.asks
        self._held: OrderedDict[int, EventBatch] = OrderedDict()
        self._seen: OrderedDict[int, float] = OrderedDict()  # applied lately: number → time stamp, to know a life again

    def start(self) -> Step:
        """Begin: ask for everything that the publisher still has, or for what came since ``resume``'s."""
        return self._ask(0) if self.expected is None else self._lost()

    def resume(self, next_sequence: int, seen: Iterable[tuple[int, float]], knowledge: Knowledge) -> None:
        """Before ``start``: every batch before this one is in the index already, from a snapshot.

        ``seen``: number and time stamp of the last of them. ``knowledge`` holds again once a replay has shown that
        the publisher is still in the life of the last one, and has brought what came since.
        """
        self.expected, self.knowledge, self._seen = next_sequence, knowledge, OrderedDict(seen)

    def reached(self, last: int) -> tuple[int, tuple[tuple[int, float], ...]] | None:
        """Return the next number and the ``last`` batches applied, for ``resume``; ``None`` while that is in doubt."""
        if self.expected is None or self.asked is not None or self.knowledge is Knowledge.STALE or self._held:
            return None
        if self.expected and not self._seen:
            return None  # nothing by which the life could be known again
        return self.expected, tuple(islice(self._seen.items(), max(0, len(self._seen) - last), None))

    def receive(self, batch: EventBatch) -> Step:
        """Take one live batch."""
        number = batch.sequence
        if self.expected is not None and number < self.expected:
            if self._is_known(batch):
                self.stats.duplicates += 1
                return Step()
            return self._restarted(batch)
        self._hold(batch)
        if self.asked is not None:
            # A batch that was merely late may have closed the gap, but only the replay can vouch for the life.
            return Step()
        if self.expected is None:
            return self._ask(0) if number and self.options.can_replay and not self._seen else self._begin_at(number)
        if number == self.expected:
            return Step(apply=self._drain())
        self.stats.gaps += 1
        return self._lost()

    def reconnected(self) -> Step:
        """The connection was lost and is back: anything may have happened in between."""
        return Step() if self.asked is not None else self._lost() if self.expected is not None else self._ask(0)

    def undecodable(self, number: int | None = None) -> Step:
        """A frame came that could not be understood; ``number``: of its batch, if that much could be."""
        self.stats.undecodable += 1
        if number is not None:
            self._told = max(self._told, number)
        return self.reconnected()

    def replayed(self, batches: Sequence[EventBatch] | None, last: int | None = None) -> Step:
        """Take the answer to the last ``ask``: the publisher's batches from there on, or ``None`` if it gave none.

        ``last``: the highest number that came with it, where not every batch could be understood.
        """
        if last is None and batches:
            last = batches[-1].sequence
        asked, self.asked = self.asked, None
        if asked is None:
            return Step()
        self.stats.replays += 1
        if batches is None:
            return self._give_up()
        if self.expected is None:
            return self._replayed_whole(batches, last)
        return self._replayed_since(batches, last)

    def _replayed_whole(self, batches: Sequence[EventBatch], last: int | None) -> Step:
        """A replay from 0 into an empty index."""
        self._merge(batches)
        self._told = max(self._told, -1 if last is None else last)
        if self._told < 0 and not self._held:
            self.expected, self.knowledge = 0, Knowledge.COMPLETE  # it has never published
            return Step()
        if 0 not in self._held:
            return self._give_up()
        return self._begin_at(0)

    def _replayed_since(self, batches: Sequence[EventBatch], last: int | None) -> Step:
        """A replay from one batch before the first missing one."""
        assert self.expected is not None
        anchor = self.expected - 1
        witness = next((batch for batch in batches if batch.sequence == anchor), None)
        if witness is None and last is not None and last >= anchor >= 0:
            return self._give_up()  # no longer buffered, or not understood: nothing can be said of the life
        if anchor >= 0 and (witness is None or not self._is_known(witness)):
            self.stats.restarts += 1
            self._held.clear()
            return self._start_over()
        self._merge(batches)
        self._told = max(self._told, -1 if last is None else last)
        return self._resume()

    def _resume(self) -> Step:
        """The life is known to be the same: go on, and ask again if something is still missing."""
        apply = self._drain()
        assert self.expected is not None
        if not self._held and self.expected > self._told:
            self._asks_left = self.options.asks
            if self.knowledge is Knowledge.STALE:
                self.knowledge = self._knowledge_before
            return Step(apply=apply)
        step = self._lost()
        return Step(reset=step.reset, apply=step.apply if step.reset else apply, ask=step.ask)

    def _begin_at(self, number: int) -> Step:
        """Start counting at ``number`` in an index that has nothing of this source."""
        self.expected = number
        self.knowledge = Knowledge.PARTIAL if number else Knowledge.COMPLETE
        self._knowledge_before = self.knowledge
        return self._resume()

    def _lost(self) -> Step:
        """Batches are missing, or the life is in doubt."""
        if self.knowledge is not Knowledge.STALE:
            self._knowledge_before, self.knowledge = self.knowledge, Knowledge.STALE
        assert self.expected is not None
        return self._ask(max(0, self.expected - 1))

    def _ask(self, number: int) -> Step:
        if not self.options.can_replay or self._asks_left == 0:
            return self._give_up()
        self._asks_left -= 1
        self.asked = number
        return Step(ask=number)

    def _restarted(self, batch: EventBatch) -> Step:
        """An old number with another time stamp: the publisher lives anew."""
        self.stats.restarts += 1
        self._held.clear()
        self._hold(batch)
        if batch.sequence:
            return self._start_over()
        self._forget_life()
        step = self._begin_at(0)
        return Step(reset=True, apply=step.apply, ask=step.ask)

    def _start_over(self) -> Step:
        """Everything applied so far belongs to another life: begin again from 0."""
        self._forget_life()
        step = self._ask(0)
        return Step(reset=True, apply=step.apply, ask=step.ask)

    def _forget_life(self) -> None:
        self._seen.clear()
        self._told = -1
        self.asked, self.expected, self.knowledge = None, None, Knowledge.PARTIAL
        self._asks_left = self.options.asks

    def _give_up(self) -> Step:
        """The missing batches can't be had: forget the source, go on with the last unbroken run of what came later.

        A batch that could not be understood ends a run, so where it was the last one only its number remains.
        """
        self.stats.failed_replays += 1
        run: list[EventBatch] = []
        for number in sorted(self._held):
            batch = self._held[number]
            if run and run[-1].sequence + 1 != number:
                run.clear()
            run.append(batch)
        told = self._told if self._told >= (self.expected or 0) else -1
        if run and run[-1].sequence < told:
            run.clear()
        reached = run[-1].sequence if run else told
        self._held.clear()
        self._forget_life()
        self._note(run)
        self._told, self.expected = reached, reached + 1 if reached >= 0 else None
        return Step(reset=True, apply=tuple(run))

    def _merge(self, batches: Iterable[EventBatch]) -> None:
        for batch in batches:
            if self.expected is None or batch.sequence >= self.expected:
                self._hold(batch)

    def _hold(self, batch: EventBatch) -> None:
        self._held[batch.sequence] = batch
        while len(self._held) > self.options.hold_batches:
            del self._held[min(self._held)]

    def _drain(self) -> tuple[EventBatch, ...]:
        """Take the held batches that follow without a gap."""
        assert self.expected is not None
        run = []
        while (batch := self._held.pop(self.expected, None)) is not None:
            run.append(batch)
            self.expected += 1
        self._note(run)
        return tuple(run)

    def _note(self, run: Iterable[EventBatch]) -> None:
        for batch in run:
            self._seen[batch.sequence] = batch.published_at_s
            if any(
                isinstance(event, TierCleared) and self.options.announced_tiers <= set(event.tiers)
                for event in batch.events
            ):
                self._flushed()
        while len(self._seen) > self.options.remember_batches:
            self._seen.popitem(last=False)

    def _flushed(self) -> None:
        """The source has nothing left from before: from here on everything is known."""
        if self.knowledge is Knowledge.PARTIAL:
            self.knowledge = Knowledge.COMPLETE

    def _is_known(self, batch: EventBatch) -> bool:
        return self._seen.get(batch.sequence) == batch.published_at_s
