"""The product's index held against the oracle, call by call; and under a tight budget, against over-claiming."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvstore.block import routing_hashes, routing_seed
from kvstore.page import Tier
from radix_index.base import LOCAL_TIERS, Knowledge
from radix_index.blocks import MIN_BYTE_BUDGET
from radix_index.index import RadixIndex
from radix_index.kernels import COMPILED
from radix_index.naive import NaiveIndex

INSTANCES = tuple(f"i{n}" for n in range(10))
POOLS = ("p", "q")
SIZES = (1, 4, 16)


def chains() -> list[list[int]]:
    """Prompts that share prefixes, under every block size and two namespaces."""
    made = []
    for size in SIZES:
        for salt in (None, "s"):
            seed = routing_seed("m", None, salt)
            trunk = routing_hashes(range(12 * size), size, seed)
            made.append(trunk)
            for fork in (0, 1, 5, 11):
                parent = trunk[fork - 1] if fork else None
                made.append(trunk[:fork] + routing_hashes(range(900, 900 + 6 * size), size, seed, parent=parent))
    return made


CHAINS = chains()
BLOCKS = sorted({block for chain in CHAINS for block in chain})
pieces = st.builds(
    lambda chain, start, length: chain[start : start + length],
    st.sampled_from(CHAINS),
    st.integers(0, 12),
    st.integers(0, 14),
)
scattered = st.lists(st.sampled_from(BLOCKS), max_size=6)  # as no engine would say it: any order, twice
blocks_of_a_call = st.one_of(pieces, pieces, scattered)
instances = st.sampled_from(INSTANCES)


def named(blocks: Sequence[int], family: int) -> list[int]:
    """What a source of this family calls the blocks."""
    return [(block * 2 + family) % 2**64 for block in blocks]


class IndexMachine(RuleBasedStateMachine):
    """Both implementations get the same calls and must give the same answers."""

    compiled = COMPILED is not None
    tickets = Bundle("tickets")

    @initialize()
    def begin(self) -> None:
        self.index, self.oracle = RadixIndex(compiled=self.compiled), NaiveIndex()
        for instance, pool in (("i0", "p"), ("i1", "p"), ("i2", None)):
            self.add(instance, 4, pool)

    @rule(instance=instances, size=st.sampled_from(SIZES), pool=st.none() | st.sampled_from(POOLS))
    def add(self, instance: str, size: int, pool: str | None) -> None:
        for index in (self.index, self.oracle):
            index.add_instance(instance, block_size=size, pool=pool)

    @rule(instance=instances)
    def remove(self, instance: str) -> None:
        for index in (self.index, self.oracle):
            index.remove_instance(instance)

    @rule(
        data=st.data(), tier=st.sampled_from(LOCAL_TIERS), blocks=blocks_of_a_call, family=st.none() | st.integers(0, 1)
    )
    def store(self, data: st.DataObject, tier: Tier, blocks: list[int], family: int | None) -> None:
        if known := list(self.oracle.instances()):
            self._store(data.draw(st.sampled_from(known)), tier, blocks, family, data.draw(st.booleans()))

    @rule(pool=st.sampled_from(POOLS), blocks=blocks_of_a_call, family=st.none() | st.integers(0, 1))
    def store_in_pool(self, pool: str, blocks: list[int], family: int | None) -> None:
        if self._has_pool(pool):
            self._store(pool, Tier.POOL, blocks, family, False)

    def _store(self, holder: str, tier: Tier, blocks: list[int], family: int | None, rebind: bool) -> None:
        names = None if family is None else named(blocks, family)
        clashes = [index.stored(holder, tier, blocks, names, rebind=rebind) for index in (self.index, self.oracle)]
        assert clashes[0] == clashes[1]

    def _has_pool(self, pool: str) -> bool:
        return self.oracle._is_pool(pool)

    @rule(tier=st.sampled_from(LOCAL_TIERS), blocks=blocks_of_a_call, data=st.data())
    def store_under_a_wrong_name(self, tier: Tier, blocks: list[int], data: st.DataObject) -> None:
        """Names that mean other blocks already: of the same family, shifted by one."""
        if known := list(self.oracle.instances()):
            holder, rebind = data.draw(st.sampled_from(known)), data.draw(st.booleans())
            names = named(blocks[1:] + blocks[:1], 0)
            clashes = [i.stored(holder, tier, blocks, names, rebind=rebind) for i in (self.index, self.oracle)]
            assert clashes[0] == clashes[1]

    @rule(data=st.data(), tier=st.sampled_from(Tier), blocks=blocks_of_a_call)
    def take_back(self, data: st.DataObject, tier: Tier, blocks: list[int]) -> None:
        holders = [p for p in POOLS if self._has_pool(p)] if tier is Tier.POOL else list(self.oracle.instances())
        if not holders:
            return
        holder = data.draw(st.sampled_from(holders))
        if data.draw(st.booleans()):
            for index in (self.index, self.oracle):
                index.removed(holder, tier, blocks)
        else:
            names = named(blocks, data.draw(st.integers(0, 1)))
            known = [index.removed_names(holder, tier, names) for index in (self.index, self.oracle)]
            assert known[0] == known[1]

    @rule(data=st.data(), tiers=st.sets(st.sampled_from(LOCAL_TIERS)))
    def clear(self, data: st.DataObject, tiers: set[Tier]) -> None:
        if known := list(self.oracle.instances()):
            instance = data.draw(st.sampled_from(known))
            for index in (self.index, self.oracle):
                index.cleared(instance, tiers)

    @rule(pool=st.sampled_from(POOLS))
    def clear_pool(self, pool: str) -> None:
        if self._has_pool(pool):
            for index in (self.index, self.oracle):
                index.cleared(pool, [Tier.POOL])

    @rule(target=tickets, data=st.data(), blocks=blocks_of_a_call)
    def reserve(self, data: st.DataObject, blocks: list[int]) -> object:
        if not (known := list(self.oracle.instances())):
            return multiple()
        instance = data.draw(st.sampled_from(known))
        tickets = [index.reserve(instance, blocks) for index in (self.index, self.oracle)]
        assert tickets[0] == tickets[1]
        return tickets[0]

    @rule(ticket=tickets)
    def release(self, ticket: int) -> None:
        for index in (self.index, self.oracle):
            index.release(ticket)

    @rule(data=st.data(), knowledge=st.sampled_from(Knowledge))
    def trust(self, data: st.DataObject, knowledge: Knowledge) -> None:
        if known := list(self.oracle.instances()):
            instance = data.draw(st.sampled_from(known))
            for index in (self.index, self.oracle):
                index.set_knowledge(instance, knowledge)

    @rule(chain=st.sampled_from(CHAINS), data=st.data())
    def ask_some(self, chain: list[int], data: st.DataObject) -> None:
        if known := list(self.oracle.instances()):
            some = data.draw(st.lists(st.sampled_from(known), unique=True))
            assert self.index.match(chain, some) == self.oracle.match(chain, some)

    @rule(blocks=blocks_of_a_call, family=st.integers(0, 1))
    def ask_for_names(self, blocks: list[int], family: int) -> None:
        names = named(blocks, family)
        assert self.index.named(names) == self.oracle.named(names)
        for instance in self.oracle.instances():
            for name in names:
                assert self.index.resolve(instance, name) == self.oracle.resolve(instance, name)

    @invariant()
    def answers_are_equal(self) -> None:
        if not hasattr(self, "index"):
            return
        for chain in CHAINS:
            assert self.index.match(chain) == self.oracle.match(chain)
        ours, theirs = self.index.stats(), self.oracle.stats()
        assert (ours.blocks, ours.instances, ours.reservations) == (
            theirs.blocks,
            theirs.instances,
            theirs.reservations,
        )
        self.index.check()
        self.oracle.check()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


class InterpretedIndexMachine(IndexMachine):
    """The same without the compiled loops."""

    compiled = False


TestInterpretedIndexMachine = InterpretedIndexMachine.TestCase
TestInterpretedIndexMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


class BudgetMachine(RuleBasedStateMachine):
    """Under a budget far too small the index forgets, but what it claims is true and its bytes stay bounded."""

    compiled = COMPILED is not None

    @initialize()
    def begin(self) -> None:
        self.index = RadixIndex(byte_budget=MIN_BYTE_BUDGET, compiled=self.compiled)
        self.oracle = NaiveIndex()
        for instance in ("i0", "i1"):
            for index in (self.index, self.oracle):
                index.add_instance(instance, block_size=16)

    @rule(
        instance=st.sampled_from(("i0", "i1")),
        tier=st.sampled_from(LOCAL_TIERS),
        prompt=st.integers(0, 30),
        length=st.integers(1, 400),
        forget=st.booleans(),
    )
    def announce(self, instance: str, tier: Tier, prompt: int, length: int, forget: bool) -> None:
        blocks = routing_hashes(range(400), 1, prompt)
        for index in (self.index, self.oracle):
            index.stored(instance, tier, blocks[:length], named(blocks[:length], 0))
            if forget:
                index.removed_names(instance, tier, named(blocks[length // 2 :], 0))

    @rule(prompt=st.integers(0, 30), length=st.integers(1, 400))
    def route(self, prompt: int, length: int) -> None:
        blocks = routing_hashes(range(400), 1, prompt)
        for index in (self.index, self.oracle):
            index.release(index.reserve("i0", blocks[:length]))

    @rule(instance=st.sampled_from(("i0", "i1")), tier=st.sampled_from(LOCAL_TIERS))
    def clear(self, instance: str, tier: Tier) -> None:
        for index in (self.index, self.oracle):
            index.cleared(instance, [tier])

    @rule(prompt=st.integers(0, 30))
    def never_claims_more_than_is_true(self, prompt: int) -> None:
        blocks = routing_hashes(range(400), 1, prompt)
        true = self.oracle.match(blocks)
        for instance, match in self.index.match(blocks).items():
            assert match.blocks <= true[instance].blocks
            # Tiers of the blocks that are claimed are the true ones.
            assert match.tier_blocks == self.oracle.match(blocks[: match.blocks])[instance].tier_blocks

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "index"):
            self.index.check()


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


class InterpretedBudgetMachine(BudgetMachine):
    """The same without the compiled loops."""

    compiled = False


TestInterpretedBudgetMachine = InterpretedBudgetMachine.TestCase
TestInterpretedBudgetMachine.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
