"""Snapshots of the index: what they hold, what is believed of them, and that changes in the middle do no harm."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

import pytest

from kvstore.block import routing_hashes, routing_seed
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, KvEvent, TierCleared
from kvstore.page import Tier
from radix_index.base import PrefixIndex
from radix_index.errors import SnapshotError
from radix_index.index import RadixIndex
from radix_index.naive import NaiveIndex
from radix_index.snapshot import MAGIC, Header, Snapshot, SnapshotWriter, SourceState, apply_part
from radix_index.source import SourceFold

SIZE = 4
PROMPTS = [[prompt * 1000 + n // SIZE // (3 - prompt % 3) for n in range(5 * SIZE)] for prompt in range(12)]
TIERS = (Tier.DEVICE, Tier.HOST)


def names_of(tokens: list[int], clash: int = 0) -> array[int]:
    """Return a source's own names of a prompt's blocks."""
    return array("Q", [hash((clash, *tokens[: end + SIZE])) % 2**64 for end in range(0, len(tokens), SIZE)])


class Engine:
    """One engine with a few prompts in two tiers and a pool; its events, and the truth about them."""

    def __init__(self, name: str, chance: random.Random, clash: int = 0) -> None:
        self.name, self.chance, self.clash = name, chance, clash
        self.said: list[EventBatch] = []

    def say(self) -> EventBatch:
        batch = EventBatch(len(self.said), float(len(self.said)), tuple(self._events()))
        self.said.append(batch)
        return batch

    def _events(self) -> Iterable[KvEvent]:
        for _ in range(self.chance.randint(1, 3)):
            tokens = self.chance.choice(PROMPTS)
            names, tier = names_of(tokens, self.clash), self.chance.choice(TIERS)
            kind = self.chance.random()
            if kind < 0.55:
                yield BlocksStored(names, None, array("I", tokens), SIZE, tier)
            elif kind < 0.95:
                yield BlocksRemoved(names[self.chance.randrange(5) :], tier)
            else:
                yield TierCleared(TIERS)


def fold_into(index: PrefixIndex, name: str) -> SourceFold:
    return SourceFold(index, name, model="m", block_size=SIZE, pool="p")


def state_of(fold: SourceFold, next_sequence: int) -> SourceState:
    return SourceState(fold.instance, "tcp://x", "m", SIZE, "p", next_sequence, (), "complete", fold.adapters)


def written(index: RadixIndex, states: Iterable[SourceState], *, rows: int = 7) -> bytes:
    writer, known = SnapshotWriter(), tuple(states)
    holders = {holder for state in known for holder in state.holders}
    pieces = [writer.begin(Header(1.0, known))]
    pieces += [writer.part(index.part(start, rows, holders)) for start in range(0, index.rows, rows)]
    return b"".join([*pieces, writer.end()])


def restored(data: bytes, index: PrefixIndex) -> dict[str, SourceFold]:
    snapshot = Snapshot(data)
    folds = {state.instance: fold_into(index, state.instance) for state in snapshot.header.sources}
    holders = frozenset(holder for state in snapshot.header.sources for holder in state.holders)
    for state in snapshot.header.sources:
        folds[state.instance].resume(state.adapters)
    for part in snapshot.parts():
        apply_part(part, index, holders)
    return folds


def claims(index: PrefixIndex) -> list[object]:
    hashes = [routing_hashes(tokens, SIZE, routing_seed("m")) for tokens in PROMPTS]
    single = [[block] for chain in hashes for block in chain]
    return [{name: match.tier_blocks for name, match in index.match(each).items()} for each in [*hashes, *single]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("clash", [0, 1], ids=["content hashes", "names of its own"])
def test_a_snapshot_taken_while_events_go_on_ends_where_they_end(seed: int, clash: int) -> None:
    """The replay from the snapshot's number on makes good whatever happened while it was taken."""
    chance = random.Random(seed)
    index = RadixIndex()
    engines = [Engine("a", chance), Engine("b", chance, clash)]
    folds = [fold_into(index, engine.name) for engine in engines]
    for _ in range(chance.randint(0, 60)):
        for engine, fold in zip(engines, folds, strict=True):
            fold.apply(engine.say())
    states = [state_of(fold, len(engine.said)) for engine, fold in zip(engines, folds, strict=True)]
    writer, start = SnapshotWriter(), 0
    pieces = [writer.begin(Header(1.0, tuple(states)))]
    while start < index.rows:
        pieces.append(writer.part(index.part(start, 3, {"a", "b", "p"})))
        start += 3
        for engine, fold in zip(engines, folds, strict=True):
            for _ in range(chance.randint(0, 2)):
                fold.apply(engine.say())
    pieces.append(writer.end())
    for later in (RadixIndex(), NaiveIndex()):
        again = restored(b"".join(pieces), later)
        for engine, state in zip(engines, states, strict=True):
            for batch in engine.said[state.next_sequence :]:
                again[engine.name].apply(batch)
        later.check()
        assert claims(later) == claims(index)


def test_a_pool_and_what_is_no_source_of_the_snapshot() -> None:
    index = RadixIndex()
    a, b = fold_into(index, "a"), fold_into(index, "b")
    tokens = PROMPTS[0]
    a.apply(EventBatch(0, 0.0, (BlocksStored(names_of(tokens), None, array("I", tokens), SIZE, Tier.POOL),)))
    b.apply(EventBatch(0, 0.0, (BlocksStored(names_of(tokens), None, array("I", tokens), SIZE, Tier.DEVICE),)))
    hashes = routing_hashes(tokens, SIZE, routing_seed("m"))
    later = NaiveIndex()
    restored(written(index, [state_of(a, 1)]), later)
    assert later.match(hashes)["a"].tier_blocks == (0, 0, 0, 5)
    assert set(later.instances()) == {"a"}
    without = SourceState("a", "tcp://x", "m", SIZE, "p", 1, (), "partial", a.adapters, keeps_pool=False)
    later = NaiveIndex()
    restored(written(index, [without]), later)
    assert later.match(hashes)["a"].blocks == 0


def test_removals_by_name_still_work_after_a_restore() -> None:
    index = RadixIndex()
    fold = fold_into(index, "a")
    tokens = PROMPTS[3]
    fold.apply(EventBatch(0, 0.0, (BlocksStored(names_of(tokens), None, array("I", tokens), SIZE, Tier.HOST),)))
    later = RadixIndex()
    again = restored(written(index, [state_of(fold, 1)]), later)
    hashes = routing_hashes(tokens, SIZE, routing_seed("m"))
    assert later.match(hashes)["a"].tier_blocks == (0, 5, 0, 0)
    again["a"].apply(EventBatch(1, 1.0, (BlocksRemoved(names_of(tokens)[2:], Tier.HOST),)))
    assert later.match(hashes)["a"].tier_blocks == (0, 2, 0, 0)


def whole() -> bytes:
    index = RadixIndex()
    fold = fold_into(index, "a")
    for number, tokens in enumerate(PROMPTS):
        stored = BlocksStored(names_of(tokens), None, array("I", tokens), SIZE, Tier.DEVICE)
        fold.apply(EventBatch(number, float(number), (stored,)))
    return written(index, [state_of(fold, len(PROMPTS))])


def test_nothing_but_a_whole_snapshot_is_believed() -> None:
    data = whole()
    assert len(Snapshot(data)) > 2
    for length in range(0, len(data), 7):
        with pytest.raises(SnapshotError):
            Snapshot(data[:length])
    for position in range(0, len(data), 7):
        spoilt = data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]
        with pytest.raises(SnapshotError):
            Snapshot(spoilt)
    for foreign in (b"", b"not ours", MAGIC, MAGIC.replace(b"1", b"9") + data[len(MAGIC) :], data + b"x", data + data):
        with pytest.raises(SnapshotError):
            Snapshot(foreign)


def test_records_of_another_shape_are_refused_although_their_checksums_are_right() -> None:
    writer = SnapshotWriter()
    state = SourceState("a", "tcp://x", "m", SIZE, None, 0, (), "complete")
    odd = writer.begin(Header(1.0, (state,))) + writer._record(Header(1.0, ())) + writer.end()
    with pytest.raises(SnapshotError):
        Snapshot(odd)
