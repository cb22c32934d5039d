"""What the index tells people: who holds how much, and who holds a block, against dictionaries."""

from __future__ import annotations

import random

from kvstore.page import Tier
from radix_index.index import RadixIndex


def test_holdings_and_holders_are_those_of_a_dictionary() -> None:
    chance = random.Random(7)
    index = RadixIndex()
    names = [f"engine-{number}" for number in range(11)]  # more than the first columns
    for name in names:
        index.add_instance(name, block_size=16, pool="shared" if name != "engine-0" else None)
    truth: set[tuple[str, Tier, int]] = set()
    for _ in range(400):
        tier = chance.choice(list(Tier))
        holder = "shared" if tier is Tier.POOL else chance.choice(names)
        blocks = chance.sample(range(1, 60), chance.randrange(1, 12))
        if chance.random() < 0.6:
            index.stored(holder, tier, blocks)
            truth |= {(holder, tier, block) for block in blocks}
        else:
            index.removed(holder, tier, blocks)
            truth -= {(holder, tier, block) for block in blocks}
    held = index.held()
    assert held.keys() == {*names, "shared"}
    for holder, counts in held.items():
        for tier in Tier:
            assert counts[tier] == sum(each[:2] == (holder, tier) for each in truth), (holder, tier)
    blocks = [*range(1, 60), 10**15]
    for block, found in zip(blocks, index.holders(blocks), strict=True):
        assert {(name, tier, block) for name, tiers in found.items() for tier in tiers} == {
            each for each in truth if each[2] == block
        }


def test_a_removed_instance_holds_nothing_and_a_reservation_is_no_holding() -> None:
    index = RadixIndex()
    index.add_instance("a", block_size=16)
    index.add_instance("b", block_size=16)
    index.stored("a", Tier.DEVICE, [1, 2])
    index.reserve("b", [1, 2, 3])
    assert index.held() == {"a": (2, 0, 0, 0), "b": (0, 0, 0, 0)}
    assert index.holders([2, 3]) == [{"a": (Tier.DEVICE,)}, {}]
    index.remove_instance("a")
    assert index.held() == {"b": (0, 0, 0, 0)}
    assert index.holders([1]) == [{}]
