"""The fold of a source's events: recorded frames against a fold by the engine's own names, then hard cases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.wire_events import decode_batch
from kvstore.block import content_hashes, event_hash, routing_hashes, routing_seed
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, KvEvent, TierCleared
from kvstore.page import Tier
from radix_index.base import PrefixIndex
from radix_index.index import RadixIndex
from radix_index.naive import NaiveIndex
from radix_index.orphans import OrphanRoom, Orphans
from radix_index.source import SourceFold
from tests.captured_events import SGLANG, VLLM, captured_frames, wire_events

MODEL = "m"
U64 = 2**64 - 1
MEDIUM_TIER = {"GPU": Tier.DEVICE, "CPU_PINNED": Tier.HOST}


@pytest.fixture(params=[RadixIndex, NaiveIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    make: Callable[[], PrefixIndex] = request.param
    return make()


def batch(*events: KvEvent, rank: int = 0) -> EventBatch:
    return EventBatch(0, 0.0, events, rank)


def chain(
    tokens: range | list[int], block_size: int = 4, parent: bytes | None = None, **fields: object
) -> BlocksStored:
    """A stored chain named as SGLang would name it."""
    salt = fields.get("salt")
    digests = content_hashes(list(tokens), block_size, salt=salt, parent=parent)  # type: ignore[arg-type]
    return BlocksStored(
        tuple(event_hash(digest) for digest in digests),
        None if parent is None else event_hash(parent),
        tuple(tokens)[: len(digests) * block_size],
        block_size,
        **({"tier": Tier.DEVICE} | fields),  # type: ignore[arg-type]
    )


def held(
    index: PrefixIndex, tokens: range | list[int], instance: str = "a", *, block_size: int = 4, **space: str
) -> tuple[int, ...]:
    hashes = routing_hashes(list(tokens), block_size, routing_seed(MODEL, **space))
    return index.match(hashes, [instance])[instance].tier_blocks


# --- recorded frames against the engine's own names ---


def fold_by_names(name: str) -> list[tuple[list[int], str | None, int, list[Tier | None]]]:
    """Replay a capture by the wire's own hashes: return every prompt seen, with the tier of each block at the end."""
    tiers: defaultdict[int, set[Tier]] = defaultdict(set)
    prompt: dict[int, tuple[int | None, list[int], str | None]] = {}
    size = 0
    for _, raw in captured_frames(name):
        for event in wire_events(raw):
            tier = MEDIUM_TIER[event.get("medium") or "GPU"]
            if event["type"] == "AllBlocksCleared":
                tiers.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    tiers[block].discard(tier)
            else:
                size, parent = event["block_size"], event["parent_block_hash"]
                salt = event.get("cache_salt") or next(iter((event.get("extra_keys") or [None])[0] or []), None)
                for i, block in enumerate(event["block_hashes"]):
                    prompt[block] = (parent, event["token_ids"][i * size : (i + 1) * size], salt if i == 0 else None)
                    tiers[block].add(tier)
                    parent = block
    return [(*_unroll(block, prompt), size, _tiers_of(block, prompt, tiers)) for block in prompt]


def _unroll(block: int, prompt: dict[int, tuple[int | None, list[int], str | None]]) -> tuple[list[int], str | None]:
    parent, tokens, salt = prompt[block]
    if parent is None:
        return tokens, salt
    before, root_salt = _unroll(parent, prompt)
    return before + tokens, root_salt


def _tiers_of(
    block: int, prompt: dict[int, tuple[int | None, list[int], str | None]], tiers: dict[int, set[Tier]]
) -> list[Tier | None]:
    parent = prompt[block][0]
    before = [] if parent is None else _tiers_of(parent, prompt, tiers)
    return [*before, min(tiers[block], default=None)]


@pytest.mark.parametrize("name", SGLANG + VLLM)
def test_a_recorded_stream_folds_to_what_the_engine_s_own_names_say(index: PrefixIndex, name: str) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=1)
    for sequence, raw in captured_frames(name):
        fold.apply(decode_batch(sequence, raw))
        index.check()
    prompts = fold_by_names(name)
    for tokens, salt, size, tiers in prompts:
        run = tiers[: tiers.index(None)] if None in tiers else tiers
        expected = tuple(run.count(tier) for tier in Tier)
        hashes = routing_hashes(tokens, size, routing_seed(MODEL, None, salt))
        assert index.match(hashes)["a"].tier_blocks == expected
    assert fold.stats.ignored == {}
    assert len(prompts) >= 8


def test_recorded_streams_leave_something_to_find(index: PrefixIndex) -> None:
    for name in SGLANG + VLLM:
        fold = SourceFold(index, name, model=MODEL, block_size=16)
        for sequence, raw in captured_frames(name):
            fold.apply(decode_batch(sequence, raw))
    assert index.stats().blocks > 20


# --- one by one ---


def test_a_chain_is_found_under_its_own_model_adapter_and_salt_only(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4)
    fold.apply(batch(chain(range(8), salt="s", adapter="x")))
    assert held(index, range(10), adapter="x", salt="s") == (2, 0, 0, 0)
    for space in ({}, {"adapter": "x"}, {"salt": "s"}, {"adapter": "y", "salt": "s"}):
        assert held(index, range(8), **space) == (0, 0, 0, 0)


def test_a_chain_continues_from_its_parent(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4)
    parent = content_hashes(list(range(8)), 4, salt="s")[-1]
    fold.apply(batch(chain(range(8), salt="s"), chain(range(8, 16), parent=parent, tier=Tier.HOST)))
    assert held(index, range(16), salt="s") == (2, 2, 0, 0)


def test_removals_and_a_flush_are_taken_back(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4)
    both = [chain(range(12)), chain(range(12), tier=Tier.HOST), chain(range(12), tier=Tier.DISK)]
    fold.apply(
        batch(*both, BlocksRemoved(both[0].hashes[1:], Tier.DEVICE), BlocksRemoved(both[0].hashes[2:], Tier.HOST))
    )
    assert held(index, range(12)) == (1, 1, 1, 0)
    fold.apply(batch(TierCleared((Tier.DEVICE, Tier.HOST))))
    assert held(index, range(12)) == (0, 0, 3, 0)
    fold.apply(batch(BlocksRemoved((both[0].hashes[1], 12345), Tier.DISK)))
    assert held(index, range(12)) == (0, 0, 1, 0)
    assert fold.stats.unknown_removed_blocks == 1


def test_pool_events_count_for_every_instance_of_that_pool(index: PrefixIndex) -> None:
    a = SourceFold(index, "a", model=MODEL, block_size=4, pool="p")
    SourceFold(index, "b", model=MODEL, block_size=4, pool="p")
    SourceFold(index, "c", model=MODEL, block_size=4, pool="q")
    a.apply(batch(chain(range(8), tier=Tier.POOL), chain(range(4))))
    assert [held(index, range(8), name) for name in "abc"] == [(1, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0)]
    a.apply(batch(TierCleared((Tier.DEVICE, Tier.HOST))))
    assert held(index, range(8), "a") == (0, 0, 0, 2)
    a.reset(pool=True)
    assert held(index, range(8), "b") == (0, 0, 0, 0)


def test_a_pool_event_of_an_instance_without_a_pool_is_ignored(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4)
    fold.apply(batch(chain(range(8), tier=Tier.POOL), BlocksRemoved((1,), Tier.POOL)))
    assert fold.stats.ignored == {"pool tier without a pool": 2}
    assert index.stats().blocks == 0


def test_orphans_wait_for_their_parent_and_then_count(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4)
    digests = content_hashes(list(range(16)), 4)
    fold.apply(batch(chain(range(12, 16), parent=digests[2]), chain(range(4, 12), parent=digests[0])))
    assert (index.stats().blocks, fold.orphans.blocks, fold.stats.orphaned_blocks) == (0, 3, 3)
    fold.apply(batch(chain(range(4))))
    assert held(index, range(16)) == (4, 0, 0, 0)
    assert fold.orphans.blocks == 0


def test_an_orphan_keeps_its_own_tier_and_holder(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4, pool="p")
    SourceFold(index, "b", model=MODEL, block_size=4, pool="p")
    parent = content_hashes(list(range(4)), 4)[0]
    fold.apply(batch(chain(range(4, 8), parent=parent, tier=Tier.POOL), chain(range(4, 8), parent=parent)))
    fold.apply(batch(chain(range(4), tier=Tier.POOL)))
    assert held(index, range(8), "b") == (0, 0, 0, 2)
    assert held(index, range(8), "a") == (1, 0, 0, 1)


def test_an_orphan_that_was_removed_meanwhile_never_counts(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4)
    digests = content_hashes(list(range(16)), 4)
    orphan = chain(range(4, 16), parent=digests[0])
    fold.apply(batch(orphan, BlocksRemoved(orphan.hashes[1:2], Tier.DEVICE), chain(range(4))))
    assert held(index, range(16)) == (2, 0, 0, 0)
    fold.apply(batch(TierCleared(tuple(Tier)), orphan, TierCleared((Tier.DEVICE, Tier.HOST)), chain(range(4))))
    assert held(index, range(16)) == (1, 0, 0, 0)


def test_orphans_are_bounded_and_the_oldest_go_first(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4, orphan_room=OrphanRoom(4))
    parents = [content_hashes([n] * 4, 4)[0] for n in range(3)]
    fold.apply(batch(*(chain(range(100 + n, 108 + n), parent=parents[n]) for n in range(3))))
    assert (fold.orphans.blocks, fold.orphans.dropped_blocks) == (4, 2)
    fold.apply(batch(chain([0] * 4), chain([2] * 4)))
    assert held(index, [0] * 4 + list(range(100, 108))) == (1, 0, 0, 0)
    assert held(index, [2] * 4 + list(range(102, 110))) == (3, 0, 0, 0)


def test_the_room_for_orphans_is_one_for_all_sources(index: PrefixIndex) -> None:
    room = OrphanRoom(4)
    a, b = (SourceFold(index, name, model=MODEL, block_size=4, orphan_room=room) for name in "ab")
    parents = [content_hashes([n] * 4, 4)[0] for n in range(3)]
    a.apply(batch(chain(range(100, 112), parent=parents[0])))
    b.apply(batch(chain(range(100, 104), parent=parents[1]), chain(range(100, 104), parent=parents[2])))
    assert (a.orphans.blocks, b.orphans.blocks, b.orphans.dropped_blocks, room.blocks) == (3, 1, 1, 4)
    a.reset()
    assert room.blocks == 1
    b.apply(batch(chain([2] * 4)))
    assert held(index, [2] * 4 + list(range(100, 104)), "b") == (2, 0, 0, 0)
    assert room.blocks == 0


@given(st.lists(st.tuples(st.sampled_from(["park", "remove", "claim", "clear"]), st.integers(0, 7)), max_size=60))
def test_removals_that_are_only_noted_cut_what_removals_at_once_would(steps: list[tuple[str, int]]) -> None:
    orphans = Orphans()
    waiting: list[tuple[int, Tier, list[int]]] = []  # parent, tier, and the names that are left, cut at once
    for what, number in steps:
        parent, tier = 1000 + number % 2, (Tier.DEVICE, Tier.HOST)[number // 2 % 2]
        if what == "park":
            names = list(range(number, number + 4))
            orphans.park(BlocksStored(tuple(names), parent, tuple(range(4)), 1, tier))
            waiting.append((parent, tier, names))
        elif what == "remove":
            orphans.remove([number], tier)
            waiting = [(p, t, left[: left.index(number)] if t is tier and number in left else left)
                       for p, t, left in waiting]  # fmt: skip
        elif what == "clear":
            orphans.clear([tier])
            waiting = [entry for entry in waiting if entry[1] is not tier]
        else:
            claimed = {(event.tier, name) for event in orphans.claim(None, [parent]) for name in event.hashes}
            assert claimed == {(t, name) for p, t, left in waiting if p == parent for name in left}
            waiting = [entry for entry in waiting if entry[0] != parent]
        assert orphans.blocks == orphans.room.blocks


def test_a_removal_goes_through_no_chain_that_waits() -> None:
    """An engine evicts block by block while thousands of chains wait: each removal is noted, none is searched for."""
    orphans = Orphans()
    for number in range(64):
        orphans.park(BlocksStored(tuple(range(number * 64, number * 64 + 64)), 10**6 + number, (0,) * 64, 1, Tier.HOST))
    looked = []
    orphans._left = looked.append  # type: ignore[method-assign, assignment]
    for name in range(10**7, 10**7 + 4096):
        orphans.remove([name], Tier.HOST)
    assert looked == []
    orphans.remove([10**8], Tier.HOST)  # as many noted as there are blocks: now it costs no more
    assert len(looked) == 64


def test_an_engine_that_began_anew_may_have_another_block_size(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=16)
    fold.apply(batch(chain(range(8), 4)))
    fold.reset()
    fold.apply(batch(chain(range(8), 2)))
    assert (index.instances()["a"], fold.stats.ignored) == (2, {})
    assert held(index, range(8), block_size=2) == (4, 0, 0, 0)


def test_the_block_size_in_the_events_wins_over_what_was_declared(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=16)
    fold.apply(batch(chain(range(8)), chain(range(8), 2)))
    assert (index.instances()["a"], fold.block_size) == (4, 4)
    assert held(index, range(8)) == (2, 0, 0, 0)
    assert fold.stats.ignored == {"block size": 1}


def test_a_parent_that_only_another_instance_holds_is_no_parent(index: PrefixIndex) -> None:
    a = SourceFold(index, "a", model=MODEL, block_size=4)
    b = SourceFold(index, "b", model=MODEL, block_size=4)
    a.apply(batch(chain(range(4))))
    b.apply(batch(chain(range(4, 8), parent=content_hashes(list(range(4)), 4)[0])))
    assert b.stats.orphaned_blocks == 1


def test_names_that_are_no_content_hashes_stay_apart(index: PrefixIndex) -> None:
    """Two engines that number their blocks 1, 2, 3 … mean different blocks by one name."""
    folds = {name: SourceFold(index, name, model=MODEL, block_size=4) for name in "ab"}
    folds["a"].apply(batch(BlocksStored((1, 2), None, tuple(range(8)), 4, Tier.DEVICE)))
    folds["b"].apply(batch(BlocksStored((1, 2), None, tuple(range(50, 58)), 4, Tier.DEVICE)))
    folds["b"].apply(batch(BlocksStored((3,), 2, tuple(range(58, 62)), 4, Tier.DEVICE)))
    assert held(index, range(50, 62), "b") == (3, 0, 0, 0)
    folds["b"].apply(batch(BlocksRemoved((2,), Tier.DEVICE)))
    assert held(index, range(50, 62), "b") == (1, 0, 0, 0)
    assert held(index, range(8), "a") == (2, 0, 0, 0)
    folds["b"].apply(batch(TierCleared(tuple(Tier)), BlocksStored((1,), None, (9, 9, 9, 9), 4, Tier.DEVICE)))
    assert held(index, [9] * 4, "b") == (1, 0, 0, 0)
    folds["b"].apply(batch(BlocksRemoved((1,), Tier.DEVICE)))
    assert held(index, [9] * 4, "b") == (0, 0, 0, 0)
    index.check()


def test_one_name_under_two_adapters_is_two_blocks_and_one_removal_ends_both(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4)
    parent = content_hashes(list(range(4)), 4)[0]
    for adapter in ("x", "y"):
        fold.apply(batch(chain(range(4), adapter=adapter), chain(range(4, 8), parent=parent, adapter=adapter)))
    assert held(index, range(8), adapter="x") == held(index, range(8), adapter="y") == (2, 0, 0, 0)
    fold.apply(batch(BlocksRemoved(chain(range(8)).hashes[1:], Tier.DEVICE)))
    assert held(index, range(8), adapter="x") == held(index, range(8), adapter="y") == (1, 0, 0, 0)


def test_other_ranks_batches_are_not_this_rank_s(index: PrefixIndex) -> None:
    fold = SourceFold(index, "a", model=MODEL, block_size=4, rank=1)
    fold.apply(batch(chain(range(4)), rank=0))
    assert held(index, range(4)) == (0, 0, 0, 0)
    fold.apply(batch(chain(range(4)), rank=1))
    assert held(index, range(4)) == (1, 0, 0, 0)
