"""The product's index: flat tables of blocks and names, interned sets of holders, one byte budget.

See the README for the layout and what each operation costs, ``docs/design/0002-index-structure.md`` for why.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.page import Tier
from radix_index.base import HashArray, Hashes, IndexStats, Knowledge, Matches
from radix_index.blocks import BlockStore
from radix_index.errors import UnknownHolderError
from radix_index.holder_sets import ALL_BITS, POOL_BIT
from radix_index.kernels import COMPILED, NO_ROW, PENDING_BIT, U32
from radix_index.pending import FurtherReservations
from radix_index.snapshot import Part, make_part

DEFAULT_BYTE_BUDGET = 512 * 2**20
_FIRST_COLUMNS = 8
_SELECTION_LIMIT = 256


@dataclass(slots=True)
class _Instance:
    column: int
    block_size: int
    pool: str | None


class RadixIndex:
    """See ``radix_index.base.PrefixIndex``.

    At most ``byte_budget`` bytes are allocated; when they are used up the blocks that were matched or announced longest
    ago are forgotten, those that never served a match first. Raises ``ValueError`` for a budget under
    ``MIN_BYTE_BUDGET``.
    """

    def __init__(self, *, byte_budget: int = DEFAULT_BYTE_BUDGET, compiled: bool = COMPILED is not None) -> None:
        self._is_compiled = compiled
        self._blocks = BlockStore(byte_budget, compiled=compiled)
        self._instances: dict[str, _Instance] = {}
        self._pools: dict[str, int] = {}  # pool → column
        self._free_columns = list(range(_FIRST_COLUMNS))[::-1]
        self._reservations: dict[int, tuple[str, HashArray]] = {}
        self._further: dict[int, FurtherReservations] = {}  # by column, while there are any
        self._tickets = 0
        self._selections: dict[tuple[str, ...], tuple[dict[str, int], U32]] = {}
        self._sizes: Mapping[str, int] = {}
        self._knowledge: dict[str, Knowledge] = {}

    # --- membership ---

    def add_instance(self, instance: str, *, block_size: int, pool: str | None = None) -> None:
        """See ``PrefixIndex.add_instance``."""
        known = self._instances.get(instance)
        if known and known.block_size != block_size:
            self.remove_instance(instance)
            known = None
        if known and known.pool == pool:
            return
        if known:
            former, known.pool = known.pool, pool
        else:
            former = None
            self._instances[instance] = _Instance(self._new_column(), block_size, pool)
            self._knowledge = self._knowledge | {instance: Knowledge.COMPLETE}
        if pool is not None and pool not in self._pools:
            self._pools[pool] = self._new_column()
        self._membership_changed(former)

    def remove_instance(self, instance: str) -> None:
        """See ``PrefixIndex.remove_instance``."""
        known = self._instances.pop(instance, None)
        if known is None:
            return
        self._release_column(known.column)
        self._knowledge = {name: k for name, k in self._knowledge.items() if name != instance}
        self._reservations = {t: r for t, r in self._reservations.items() if r[0] != instance}
        self._further.pop(known.column, None)
        self._membership_changed(known.pool)

    def _membership_changed(self, former_pool: str | None) -> None:
        if former_pool is not None and all(known.pool != former_pool for known in self._instances.values()):
            self._release_column(self._pools.pop(former_pool))
        readers = {k.column: self._pools[k.pool] for k in self._instances.values() if k.pool is not None}
        self._blocks.sets.set_pools(readers)
        self._selections.clear()
        self._sizes = {name: known.block_size for name, known in self._instances.items()}

    def _new_column(self) -> int:
        if not self._free_columns:
            width = self._blocks.sets.width
            self._blocks.sets.widen(2 * width)
            self._free_columns = list(range(width, 2 * width))[::-1]
        return self._free_columns.pop()

    def _release_column(self, column: int) -> None:
        self._blocks.sets.clear(column, ALL_BITS)
        self._free_columns.append(column)

    def instances(self) -> Mapping[str, int]:
        """See ``PrefixIndex.instances``."""
        return self._sizes

    def set_knowledge(self, instance: str, knowledge: Knowledge) -> None:
        """See ``PrefixIndex.set_knowledge``."""
        self._known(instance)
        self._knowledge = self._knowledge | {instance: knowledge}

    def knowledge(self) -> Mapping[str, Knowledge]:
        """See ``PrefixIndex.knowledge``."""
        return self._knowledge

    def _known(self, instance: str) -> _Instance:
        try:
            return self._instances[instance]
        except KeyError:
            raise UnknownHolderError(instance) from None

    def _column(self, holder: str, tier: Tier) -> int:
        if tier is not Tier.POOL:
            return self._known(holder).column
        if holder not in self._pools:
            raise UnknownHolderError(holder)
        return self._pools[holder]

    # --- what holders say ---

    def stored(
        self, holder: str, tier: Tier, hashes: Hashes, names: Hashes | None = None, *, rebind: bool = False
    ) -> int:
        """See ``PrefixIndex.stored``."""
        column, blocks = self._column(holder, tier), _array(hashes)
        aliases = None if names is None else _array(names)
        if aliases is not None and len(aliases) != len(blocks):
            raise ValueError("one name a block")
        if len(blocks) > self._blocks.longest_chain:
            limit = self._blocks.longest_chain
            blocks, aliases = blocks[:limit], None if aliases is None else aliases[:limit]
        rows = self._blocks.upsert(blocks, 0 if aliases is None else len(aliases))
        self._blocks.change(rows, column, 1 << tier, add=True)
        return 0 if aliases is None else self._blocks.bind(aliases, rows, rebind=rebind)

    def removed(self, holder: str, tier: Tier, hashes: Hashes) -> None:
        """See ``PrefixIndex.removed``."""
        self._blocks.change(self._blocks.known(_array(hashes)), self._column(holder, tier), 1 << tier, add=False)

    def removed_names(self, holder: str, tier: Tier, names: Hashes) -> int:
        """See ``PrefixIndex.removed_names``."""
        column = self._column(holder, tier)
        rows, _ = self._blocks.meant(_array(names))
        self._blocks.change(rows, column, 1 << tier, add=False)
        return len(rows)

    def resolve(self, instance: str, name: int) -> int | None:
        """See ``PrefixIndex.resolve``."""
        known = self._known(instance)
        rows, _ = self._blocks.meant(np.array([name], np.uint64))
        if not len(rows):
            return None
        number = int(self._blocks.set_numbers[rows[0]])
        bits = self._blocks.sets.bits(number, known.column)
        if known.pool is not None:
            bits |= self._blocks.sets.bits(number, self._pools[known.pool]) & POOL_BIT
        return int(self._blocks.table.keys[rows[0]]) if bits & ~PENDING_BIT else None

    def named(self, names: Hashes) -> list[int | None]:
        """See ``PrefixIndex.named``."""
        found: list[int | None] = [None] * len(names)
        rows, positions = self._blocks.meant(_array(names))
        for position, block in zip(positions.tolist(), self._blocks.table.keys[rows].tolist(), strict=True):
            found[position] = block
        return found

    def cleared(self, holder: str, tiers: Iterable[Tier]) -> None:
        """See ``PrefixIndex.cleared``."""
        for tier in tiers:
            self._blocks.sets.clear(self._column(holder, tier), 1 << tier)

    # --- what requests ask ---

    def match(self, hashes: Hashes, instances: Iterable[str] | None = None) -> Matches:
        """See ``PrefixIndex.match``."""
        names = tuple(self._instances if instances is None else instances)
        selection = self._selections.get(names)
        if selection is None:
            selection = self._select(names)
        positions, columns = selection
        return Matches(positions, self._blocks.match(_array(hashes), columns), self._knowledge)

    def _select(self, names: tuple[str, ...]) -> tuple[dict[str, int], U32]:
        """Return, and remember until the membership changes, where each instance stands in a match."""
        if len(self._selections) >= _SELECTION_LIMIT:
            self._selections.clear()
        positions = {name: position for position, name in enumerate(dict.fromkeys(names))}
        columns = np.array([self._known(name).column for name in positions], np.uint32)
        self._selections[names] = positions, columns
        return positions, columns

    def reserve(self, instance: str, hashes: Hashes) -> int:
        """See ``PrefixIndex.reserve``."""
        column, blocks = self._known(instance).column, _array(hashes)[: self._blocks.longest_chain].copy()
        before = len(self._blocks.table)
        rows = self._blocks.upsert(blocks, 0)
        if len(self._blocks.table) - before < len(blocks):  # else all are new, as mostly
            self._reserve_again(column, blocks[self._blocks.has(rows, column, PENDING_BIT)])
        self._blocks.change(rows, column, PENDING_BIT, add=True)
        self._tickets += 1
        self._reservations[self._tickets] = (instance, blocks)
        return self._tickets

    def _reserve_again(self, column: int, repeated: HashArray) -> None:
        """Count what is reserved there already once more."""
        if len(repeated):
            further = self._further.get(column)
            if further is None:
                further = self._further[column] = FurtherReservations(compiled=self._is_compiled)
            further.add(_distinct(repeated))

    def release(self, ticket: int) -> None:
        """See ``PrefixIndex.release``."""
        instance, blocks = self._reservations.pop(ticket, ("", None))
        if blocks is None:
            return
        column = self._instances[instance].column
        further = self._further.get(column)
        if further is not None:
            blocks = further.take(_distinct(blocks))
            if not len(further):
                del self._further[column]
        self._blocks.change(self._blocks.known(blocks), column, PENDING_BIT, add=False)

    # --- for a snapshot ---

    @property
    def rows(self) -> int:
        """Rows that ``part`` goes through: all blocks stand in them."""
        return self._blocks.table.used

    def part(self, start: int, rows: int, holders: Container[str]) -> Part:
        """Return what these rows say of ``holders``. O(rows + distinct sets · holders)."""
        blocks, names, numbers = self._blocks.span(start, rows)
        columns = {known.column: name for name, known in self._instances.items() if name in holders}
        columns |= {column: pool for pool, column in self._pools.items() if pool in holders}
        sets = {
            number: members
            for number in np.unique(numbers).tolist()
            if (members := self._blocks.sets.members(number, columns))
        }
        return make_part(blocks, names, numbers.astype(np.uint64), sets)

    # --- for people ---

    def held(self) -> dict[str, tuple[int, int, int, int]]:
        """Return how many blocks each instance, and each pool, holds by tier. O(distinct sets · holders)."""
        sets, columns = self._blocks.sets, self._holder_names()
        found = {name: [0, 0, 0, 0] for name in columns.values()}
        for number in sets.live():
            rows = sets.rows(number)
            for name, bits in sets.members(number, columns):
                for tier in Tier:
                    found[name][tier] += rows if bits >> tier & 1 else 0
        return {name: (counts[0], counts[1], counts[2], counts[3]) for name, counts in found.items()}

    def holders(self, hashes: Hashes) -> list[dict[str, tuple[Tier, ...]]]:
        """Return for each block who holds it, and in which tiers; asking does not count as use. O(blocks)."""
        blocks, columns = self._blocks, self._holder_names()
        found: list[dict[str, tuple[Tier, ...]]] = []
        for row in blocks.table.find(_array(hashes)).tolist():
            members = () if row == NO_ROW else blocks.sets.members(int(blocks.set_numbers[row]), columns)
            found.append({name: tuple(tier for tier in Tier if bits >> tier & 1) for name, bits in members})
        return found

    def _holder_names(self) -> dict[int, str]:
        columns = {known.column: name for name, known in self._instances.items()}
        return columns | {column: pool for pool, column in self._pools.items()}

    # --- about itself ---

    def stats(self) -> IndexStats:
        """See ``PrefixIndex.stats``. Aliases of cleared blocks count until they go in passing."""
        return IndexStats(
            blocks=len(self._blocks.table) - self._blocks.sets.empty_rows,
            names=len(self._blocks.names.table),
            holder_sets=len(self._blocks.sets),
            instances=len(self._instances),
            reservations=len(self._reservations),
            used_bytes=self._blocks.nbytes,
            byte_budget=self._blocks.byte_budget,
            evicted_blocks=self._blocks.evicted,
        )

    def check(self) -> None:
        """See ``PrefixIndex.check``."""
        self._blocks.check()
        used = [known.column for known in self._instances.values()] + list(self._pools.values())
        assert len(set(used)) == len(used), "two holders share a column"
        assert set(used) | set(self._free_columns) == set(range(self._blocks.sets.width)), "a column is lost"
        assert {k.pool for k in self._instances.values()} - {None} == self._pools.keys(), "pools are out of date"
        for further in self._further.values():
            assert len(further)
            further.check()


def _array(hashes: Hashes) -> HashArray:
    """Return the hashes as a contiguous array; nothing is copied if they are one. Raises ``OverflowError``."""
    if isinstance(hashes, np.ndarray):
        return np.ascontiguousarray(hashes, np.uint64)
    return np.frombuffer(array("Q", hashes), np.uint64)  # from a list twice as fast as numpy's own way


def _distinct(blocks: HashArray) -> HashArray:
    """Return each block once. The blocks of a prompt are distinct, which is soon seen, and stay in their order."""
    ordered = np.sort(blocks)
    return np.unique(blocks) if (ordered[1:] == ordered[:-1]).any() else blocks
