"""Every fault at every step of a stream: what the index claims as exact is true, and it becomes exact again.

A publisher with a replay buffer sends batches that store, remove and clear blocks. A network loses, doubles, swaps and
delays them; the publisher restarts; the gateway is killed and goes on from its last snapshot. After every step the
index must equal the fold of an unbroken prefix of one life of the publisher (``COMPLETE``), or claim nothing beyond it
(``PARTIAL``); ``STALE`` promises nothing.

The bound, as the README states it: when nothing else is lost, and the publisher still has what is missing, the first
batch or connection after the fault and one replay make the index exact again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block import content_hashes, event_hash, routing_hashes, routing_seed
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, KvEvent, TierCleared
from kvstore.page import Tier
from radix_index.base import Knowledge
from radix_index.naive import NaiveIndex
from radix_index.resync import Resync, ResyncOptions, Step
from radix_index.source import SourceFold

MODEL, SIZE = "m", 4
PROMPTS = [[n] * 4 + list(range(4, 16)) for n in range(3)]
HASHES = [routing_hashes(prompt, SIZE, routing_seed(MODEL)) for prompt in PROMPTS]
TIERS = (Tier.DEVICE, Tier.HOST)
FLUSH = TierCleared(TIERS)


def stored(prompt: list[int], tier: Tier, start: int = 0) -> BlocksStored:
    digests = content_hashes(prompt, SIZE)
    names = tuple(event_hash(digest) for digest in digests)
    return BlocksStored(names[start:], names[start - 1] if start else None, tuple(prompt[start * SIZE :]), SIZE, tier)


def removed(prompt: list[int], tier: Tier, start: int) -> BlocksRemoved:
    return BlocksRemoved(stored(prompt, tier).hashes[start:], tier)


class Engine:
    """The publisher: what it has said in this life, what it can replay of it."""

    def __init__(self, *, buffered: int = 10_000, clock_steps_back: bool = False, flush_first: bool = False) -> None:
        self.buffered, self.flush_first, self.clock_steps_back = buffered, flush_first, clock_steps_back
        self.lives: list[list[EventBatch]] = [[]]
        self.garbled: set[int] = set()  # numbers of batches that nobody understands
        self.clock = 1000.0

    @property
    def said(self) -> list[EventBatch]:
        return self.lives[-1]

    def say(self, chance: random.Random) -> EventBatch:
        self.clock += 1.0
        batch = EventBatch(len(self.said), self.clock, tuple(self._events(chance)))
        self.said.append(batch)
        return batch

    def _events(self, chance: random.Random) -> Iterator[KvEvent]:
        if self.flush_first and not self.said and len(self.lives) > 1:
            yield FLUSH
        for _ in range(chance.randint(1, 2)):
            prompt, tier = chance.choice(PROMPTS), chance.choice(TIERS)
            kind = chance.random()
            if kind < 0.6:
                yield stored(prompt, tier)
            elif kind < 0.97:
                yield removed(prompt, tier, chance.randint(0, 3))
            else:
                yield FLUSH

    def restart(self) -> None:
        self.lives.append([])
        self.garbled.clear()
        self.clock += -500.5 if self.clock_steps_back else 10.0

    def replay(self, first: int) -> tuple[list[EventBatch], int | None]:
        """Return the batches that a receiver understands, and the number of the last one that it gets."""
        batches = [batch for batch in self.said[-self.buffered :] if batch.sequence >= first]
        last = batches[-1].sequence if batches else None
        return [batch for batch in batches if batch.sequence not in self.garbled], last


@dataclass
class Saved:
    """A snapshot, as values."""

    index: NaiveIndex
    reached: tuple[int, tuple[tuple[int, float], ...]]
    knowledge: Knowledge
    adapters: tuple[tuple[str | None, bool], ...]
    heard: EventBatch | None


@dataclass
class Gateway:
    """The receiving side, as ``gateway.feeds`` runs it, and what must hold for it after every step."""

    engine: Engine
    can_replay: bool = True
    answers: Iterator[bool] = field(default_factory=lambda: iter(lambda: True, None))  # whether each replay succeeds
    steps: int = 0

    def __post_init__(self) -> None:
        self.index = NaiveIndex()
        self.fold = SourceFold(self.index, "a", model=MODEL, block_size=SIZE)
        self.resync = Resync(ResyncOptions(can_replay=self.can_replay, announced_tiers=frozenset(TIERS)))
        self.heard: EventBatch | None = None

    def snapshot(self) -> Saved | None:
        """Return what a gateway that comes after this one finds, ``None`` while it is in doubt what is known."""
        reached = self.resync.reached(64)
        if reached is None:
            return None
        return Saved(copy.deepcopy(self.index), reached, self.resync.knowledge, self.fold.adapters, self.heard)

    def killed(self, saved: Saved | None) -> Gateway:
        """Be killed; return the next one, which has begun from what was saved."""
        after = Gateway(self.engine, self.can_replay, self.answers)
        if saved is not None:
            after.index, after.heard = copy.deepcopy(saved.index), saved.heard
            after.fold = SourceFold(after.index, "a", model=MODEL, block_size=SIZE)
            after.fold.resume(saved.adapters)
            after.resync.resume(*saved.reached, saved.knowledge)
        after.take(after.resync.start())
        return after

    def receive(self, batch: EventBatch) -> None:
        """Take a live frame, which may be one that nobody understands."""
        if batch.sequence in self.engine.garbled:
            self.take(self.resync.undecodable(batch.sequence))
        else:
            self.take(self.resync.receive(batch))

    def take(self, step: Step) -> None:
        for _ in range(20):
            if step.reset:
                self.fold.reset()
            for batch in step.apply:
                self.fold.apply(batch)
                self.heard = batch
            self.verify()
            if step.ask is None:
                return
            step = self.resync.replayed(*(self.engine.replay(step.ask) if next(self.answers) else (None,)))
        raise AssertionError("asks for replays without end")

    def verify(self) -> None:
        """What is claimed is the fold of the life of the last batch applied, up to that batch."""
        self.steps += 1
        self.index.check()
        if self.resync.knowledge is Knowledge.STALE:
            return
        claims = [self.index.match(hashes)["a"] for hashes in HASHES]
        for truth in self.truths():
            true = [truth.match(hashes)["a"] for hashes in HASHES]
            if self.resync.knowledge is Knowledge.COMPLETE and claims == true:
                return
            if self.resync.knowledge is Knowledge.PARTIAL and all(
                map(is_within, HASHES, [self.index] * 9, [truth] * 9)
            ):
                return
        raise AssertionError(f"{self.resync.knowledge}: {claims}")

    def truths(self) -> Iterator[NaiveIndex]:
        if self.heard is None or not any(self.index.match(hashes)["a"].blocks for hashes in HASHES):
            yield folded([])
        if self.heard is not None:
            yield from (folded(life[: self.heard.sequence + 1]) for life in self.engine.lives if self.heard in life)


def is_within(hashes: list[int], index: NaiveIndex, truth: NaiveIndex) -> bool:
    """Every tier of every block that is claimed is true."""
    for block in hashes:
        claimed = {tier for tier in Tier if ("a", tier) in index._places.get(block, ())}
        true = {tier for tier in Tier if ("a", tier) in truth._places.get(block, ())}
        if not claimed <= true:
            return False
    return True


def folded(batches: Iterable[EventBatch]) -> NaiveIndex:
    index = NaiveIndex()
    fold = SourceFold(index, "a", model=MODEL, block_size=SIZE)
    for batch in batches:
        fold.apply(batch)
    return index


# --- one fault at every position ---

Network = Callable[[list[EventBatch]], list[EventBatch]]
LENGTH = 8
FAULTS: dict[str, Callable[[int], Network]] = {
    "none": lambda at: lambda frames: frames,
    "lost": lambda at: lambda frames: frames[:at] + frames[at + 1 :],
    "two lost": lambda at: lambda frames: frames[:at] + frames[at + 2 :],
    "doubled": lambda at: lambda frames: frames[: at + 1] + frames[at:],
    "swapped": lambda at: lambda frames: frames[:at] + frames[at : at + 2][::-1] + frames[at + 2 :],
    "three late": lambda at: lambda frames: [*frames[:at], *frames[at + 1 : at + 4], frames[at], *frames[at + 4 :]],
    "again much later": lambda at: lambda frames: [*frames, *frames[at : at + 1]],
    "all before it lost": lambda at: lambda frames: frames[at:],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("can_replay", [True, False], ids=["replay", "no replay"])
@pytest.mark.parametrize("buffered", [10_000, 3, 1], ids=["all kept", "three kept", "one kept"])
def test_one_fault_at_every_position(fault: str, can_replay: bool, buffered: int) -> None:
    for at in range(LENGTH):
        for seed in range(3):
            chance = random.Random(seed)
            engine = Engine(buffered=buffered)
            gateway = Gateway(engine, can_replay)
            gateway.take(gateway.resync.start())
            frames = [engine.say(chance) for _ in range(LENGTH)]
            for frame in FAULTS[fault](at)(frames):
                gateway.take(gateway.resync.receive(frame))
            gateway.take(gateway.resync.receive(engine.say(chance)))
            if can_replay and buffered > LENGTH:
                assert_exact(gateway)
            assert gateway.resync.knowledge is not Knowledge.STALE


def assert_exact(gateway: Gateway) -> None:
    assert gateway.resync.knowledge is Knowledge.COMPLETE
    truth = folded(gateway.engine.said)
    assert [gateway.index.match(hashes) for hashes in HASHES] == [truth.match(hashes) for hashes in HASHES]


@pytest.mark.parametrize("buffered", [10_000, 2])
@pytest.mark.parametrize("clock_steps_back", [False, True])
@pytest.mark.parametrize("flush_first", [False, True])
@pytest.mark.parametrize("lost_after", range(4), ids="{} frames of the new life lost".format)
def test_a_restart_at_every_position(buffered: int, clock_steps_back: bool, flush_first: bool, lost_after: int) -> None:
    for at in range(LENGTH):
        for lost_before in range(3):
            chance = random.Random(at)
            engine = Engine(buffered=buffered, clock_steps_back=clock_steps_back, flush_first=flush_first)
            gateway = Gateway(engine)
            gateway.take(gateway.resync.start())
            for frame in [engine.say(chance) for _ in range(at)][: at - lost_before or None]:
                gateway.take(gateway.resync.receive(frame))
            engine.restart()
            fresh = [engine.say(chance) for _ in range(LENGTH)]
            gateway.take(gateway.resync.reconnected())
            for frame in fresh[lost_after:]:
                gateway.take(gateway.resync.receive(frame))
            if buffered > LENGTH:
                assert_exact(gateway)


@pytest.mark.parametrize("can_replay", [True, False], ids=["replay", "no replay"])
@pytest.mark.parametrize("buffered", [10_000, 3, 1], ids=["all kept", "three kept", "one kept"])
@pytest.mark.parametrize("restarts", [(), ("while it is down",), ("before the snapshot",), ("after the snapshot",)])
def test_a_gateway_killed_at_every_position(can_replay: bool, buffered: int, restarts: tuple[str, ...]) -> None:
    """The snapshot is any number of batches old, the engine goes on or restarts, before, between or meanwhile."""
    for saved_at in range(LENGTH):
        for killed_at in range(saved_at, LENGTH):
            for missed in (0, 2):
                chance = random.Random(saved_at * 100 + killed_at)
                engine = Engine(buffered=buffered, clock_steps_back=killed_at % 2 == 0)
                gateway = Gateway(engine, can_replay)
                gateway.take(gateway.resync.start())
                saved = gateway.snapshot()
                for position in range(killed_at + 1):
                    if position == saved_at:
                        if "before the snapshot" in restarts:
                            engine.restart()
                            gateway.take(gateway.resync.reconnected())
                        saved = gateway.snapshot()
                        if "after the snapshot" in restarts:
                            engine.restart()
                            gateway.take(gateway.resync.reconnected())
                    gateway.take(gateway.resync.receive(engine.say(chance)))
                if "while it is down" in restarts:
                    engine.restart()
                for _ in range(missed):
                    engine.say(chance)
                gateway = gateway.killed(saved)
                if can_replay and buffered > LENGTH:
                    assert_exact(gateway)
                assert gateway.resync.knowledge is not Knowledge.STALE
                gateway.take(gateway.resync.receive(engine.say(chance)))
                assert gateway.resync.knowledge is not Knowledge.STALE
                if can_replay and buffered > LENGTH:
                    assert_exact(gateway)


def test_what_the_engine_no_longer_has_is_in_the_snapshot() -> None:
    chance = random.Random(9)
    engine = Engine(buffered=3)
    gateway = Gateway(engine)
    gateway.take(gateway.resync.start())
    for _ in range(20):
        gateway.take(gateway.resync.receive(engine.say(chance)))
    saved = gateway.snapshot()
    for _ in range(2):
        engine.say(chance)
    assert_exact(gateway.killed(saved))
    assert gateway.killed(None).resync.knowledge is Knowledge.PARTIAL
    engine.say(chance)  # now the snapshot's last batch is out of reach, and nothing proves that nothing is missing
    assert gateway.killed(saved).resync.knowledge is Knowledge.PARTIAL


def test_a_restart_that_comes_to_the_very_next_number_is_found_by_the_reconnection() -> None:
    """Sequence numbers and the order of frames look flawless: only the connection tells."""
    chance = random.Random(1)
    engine = Engine()
    gateway = Gateway(engine)
    gateway.take(gateway.resync.start())
    for _ in range(3):
        gateway.take(gateway.resync.receive(engine.say(chance)))
    engine.restart()
    for _ in range(3):
        engine.say(chance)
    gateway.take(gateway.resync.reconnected())
    gateway.take(gateway.resync.receive(engine.say(chance)))
    assert_exact(gateway)
    assert gateway.resync.stats.restarts == 1


def test_a_gap_is_stale_at_once_and_exact_again_after_the_replay() -> None:
    chance = random.Random(2)
    engine = Engine()
    gateway = Gateway(engine)
    gateway.take(gateway.resync.start())
    gateway.take(gateway.resync.receive(engine.say(chance)))
    engine.say(chance)
    step = gateway.resync.receive(engine.say(chance))
    assert (step.reset, step.apply, step.ask) == (False, (), 0)
    assert gateway.resync.knowledge is Knowledge.STALE
    gateway.take(gateway.resync.receive(engine.say(chance)))
    assert gateway.resync.knowledge is Knowledge.STALE
    gateway.take(gateway.resync.replayed(*engine.replay(0)))
    assert_exact(gateway)
    assert (gateway.resync.stats.gaps, gateway.resync.stats.replays) == (1, 2)


def test_a_replay_that_fails_forgets_the_source_and_says_so() -> None:
    chance = random.Random(3)
    engine = Engine()
    gateway = Gateway(engine, answers=iter([True, False]))
    gateway.take(gateway.resync.start())
    gateway.take(gateway.resync.receive(engine.say(chance)))
    engine.say(chance)
    gateway.take(gateway.resync.receive(engine.say(chance)))
    assert gateway.resync.knowledge is Knowledge.PARTIAL
    assert gateway.resync.stats.failed_replays == 1


def test_a_flush_makes_what_was_partial_complete() -> None:
    engine = Engine()
    gateway = Gateway(engine, can_replay=False)
    gateway.take(gateway.resync.start())
    chance = random.Random(4)
    for _ in range(3):
        engine.say(chance)
    gateway.take(gateway.resync.receive(engine.say(chance)))
    assert gateway.resync.knowledge is Knowledge.PARTIAL
    engine.said.append(EventBatch(4, 9999.0, (FLUSH,)))
    gateway.take(gateway.resync.receive(engine.said[-1]))
    assert gateway.resync.knowledge is Knowledge.COMPLETE


def test_a_flush_of_some_tiers_leaves_the_others_unknown() -> None:
    resync = Resync(ResyncOptions(can_replay=False))
    resync.receive(EventBatch(4, 1.0, (FLUSH,)))
    assert resync.knowledge is Knowledge.PARTIAL
    resync.receive(EventBatch(5, 2.0, (TierCleared(tuple(Tier)),)))
    assert resync.knowledge is Knowledge.COMPLETE


def test_an_undecodable_frame_is_made_good_by_a_replay() -> None:
    chance = random.Random(5)
    engine = Engine()
    gateway = Gateway(engine)
    gateway.take(gateway.resync.start())
    gateway.take(gateway.resync.receive(engine.say(chance)))
    engine.say(chance)
    gateway.take(gateway.resync.undecodable())
    assert_exact(gateway)
    assert gateway.resync.stats.undecodable == 1


@pytest.mark.parametrize("can_replay", [True, False], ids=["replay", "no replay"])
@pytest.mark.parametrize("is_there_first", [True, False], ids=["live", "only in the first replay"])
@pytest.mark.parametrize("garbled", [1, 2, LENGTH], ids="{} not understood".format)
def test_a_batch_that_nobody_understands_is_missing_also_as_the_last_one(
    can_replay: bool, is_there_first: bool, garbled: int
) -> None:
    """Replays repeat it as it is, so what it said can't be had: nothing is complete until everything is flushed."""
    for at in range(LENGTH - garbled + 1):
        chance = random.Random(at)
        engine = Engine()
        gateway = Gateway(engine, can_replay)
        engine.garbled.update(range(at, at + garbled))
        if is_there_first:
            gateway.take(gateway.resync.start())
        for _ in range(at + garbled):
            frame = engine.say(chance)
            if is_there_first:
                gateway.receive(frame)
        if not is_there_first:
            gateway.take(gateway.resync.start())
        assert gateway.resync.knowledge is Knowledge.PARTIAL
        assert not any(gateway.index.match(hashes)["a"].blocks for hashes in HASHES)
        for _ in range(2):
            gateway.receive(engine.say(chance))
            assert gateway.resync.knowledge is not Knowledge.STALE
        assert gateway.resync.stats.restarts == 0
        engine.said.append(EventBatch(len(engine.said), engine.clock + 1, (FLUSH,)))
        gateway.receive(engine.said[-1])
        assert_exact(gateway)


def test_an_engine_that_nobody_understands_costs_a_few_short_replays_a_batch() -> None:
    chance = random.Random(4)
    engine = Engine()
    gateway = Gateway(engine)
    gateway.take(gateway.resync.start())
    engine.garbled.update(range(100))
    for _ in range(20):
        engine.say(chance)
    asked: list[int] = []
    replay = engine.replay
    engine.replay = lambda first: (asked.append(first), replay(first))[1]  # type: ignore[method-assign, func-returns-value]
    for number in range(20, 40):
        engine.say(chance)
        gateway.take(gateway.resync.undecodable(number))
    assert sum(number < 18 for number in asked) <= 3
    assert len(asked) <= 3 * 20
    assert gateway.resync.knowledge is Knowledge.PARTIAL


def test_an_engine_that_never_spoke_is_known_completely() -> None:
    gateway = Gateway(Engine())
    gateway.take(gateway.resync.start())
    assert gateway.resync.knowledge is Knowledge.COMPLETE


# --- many faults at once ---


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([10_000, 4, 1]), st.booleans(), st.booleans(), st.booleans())
def test_any_mix_of_faults(seed: int, buffered: int, can_replay: bool, back: bool, flush: bool) -> None:
    chance = random.Random(seed)
    engine = Engine(buffered=buffered, clock_steps_back=back, flush_first=flush)
    failing = iter(lambda: chance.random() < 0.8, None)
    gateway = Gateway(engine, can_replay, answers=failing)
    for _ in range(chance.randint(0, 3)):
        engine.say(chance)
    gateway.take(gateway.resync.start())
    wire: list[EventBatch] = []
    saved: Saved | None = None
    for _ in range(25):
        act = chance.random()
        if act < 0.08:
            engine.restart()
            wire.clear()  # what a closed connection still held is gone …
            gateway.take(gateway.resync.reconnected())  # … and the subscriber is told before it gets anything new
        elif act < 0.16 and wire:
            wire.pop(chance.randrange(len(wire)))
        elif act < 0.24 and wire:
            wire.insert(chance.randrange(len(wire) + 1), chance.choice(wire))
        elif act < 0.32:
            chance.shuffle(wire)
        elif act < 0.36:
            gateway.take(gateway.resync.undecodable())
        elif act < 0.42:
            saved = gateway.snapshot() or saved
        elif act < 0.46:
            wire.clear()
            gateway = gateway.killed(saved)
        elif act < 0.7:
            wire.append(engine.say(chance))
            if chance.random() < 0.1:
                engine.garbled.add(wire[-1].sequence)
        elif wire:
            gateway.receive(wire.pop(0))
    gateway.answers = iter(lambda: True, None)
    gateway.take(gateway.resync.receive(engine.say(chance)))
    assert gateway.resync.knowledge is not Knowledge.STALE
    if can_replay and buffered > 1000:
        gateway.take(gateway.resync.receive(engine.say(chance)))
        if gateway.resync.knowledge is Knowledge.COMPLETE:
            assert_exact(gateway)
