"""Rows of blocks with their holders, recency and names, kept within a byte budget."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radix_index.holder_sets import NOBODY, HolderSets
from radix_index.kernels import COMPILED, I32, INTERPRETED, NO_ROW, TALLY_WIDTH, U32, U64, tally
from radix_index.names import Names
from radix_index.table import ROW_LIMIT, DictTable, FlatTable, Table

try:
    from radix_index import _kernels
except ImportError:
    pass

MIN_BYTE_BUDGET = 256 * 1024
_TABLE_SHARE = 7 / 8  # of the budget, for tables and columns
_SET_SHARE = 1 / 16  # for holder sets; what is left is room for one call to overshoot
_CHAIN_BYTES = 1024  # of the budget for every block of the longest chain that is taken whole
_GROWTH = 1.125
_SWEEP_ROWS = 2048
_EASY_ROOM = 4096  # blocks after which room is thought of anew
_SAMPLE_ROWS = 256
_EVICT_QUANTILES = (0.75, 0.5, 0.0)  # of the sampled ages: first the oldest quarter goes, then half, then all
_STAMP_MASK = 0xFFFF_FFFF


class BlockStore:
    """One row a block: its hash (``table``), set of holders, stamp of the last use, and head of its list of names.

    Stamps count calls; a match stamps the blocks it passed into the future, by half of what blocks lately lived, so
    that what served a match outlives what was only announced. A wrapped stamp makes an old block look young, no more.
    """

    column_bytes = 12
    """Bytes a row takes beside the table's."""

    def __init__(self, byte_budget: int, *, compiled: bool = COMPILED is not None) -> None:
        if byte_budget < MIN_BYTE_BUDGET:
            raise ValueError(f"byte_budget {byte_budget} is under {MIN_BYTE_BUDGET}")
        self.byte_budget = byte_budget
        self._loops = COMPILED if compiled and COMPILED is not None else INTERPRETED
        make = FlatTable if self._loops is COMPILED else DictTable
        self.table: FlatTable | DictTable = make()
        self.names, self.sets = Names(make(), self._loops), HolderSets()
        rows = self.table.capacity
        self.set_numbers: U32 = np.zeros(rows, np.uint32)
        self.stamps: U32 = np.zeros(rows, np.uint32)
        self.first_names: U32 = np.zeros(rows, np.uint32)
        self.evicted = 0
        self._clock = 0
        self._hand = 0
        self._bonus = 0
        self._easy_room = 0  # blocks, and names, that can come before room must be thought of

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        columns = self.set_numbers.nbytes + self.stamps.nbytes + self.first_names.nbytes
        return self.table.nbytes + self.names.nbytes + self.sets.nbytes + columns

    # --- rows ---

    def known(self, blocks: U64) -> U32:
        """Return the rows of those blocks that are known."""
        rows = self.table.find(blocks)
        known: U32 = rows[rows != NO_ROW]
        return known

    @property
    def longest_chain(self) -> int:
        """The most blocks of one call that are taken; the rest of a longer chain is left out."""
        return self.byte_budget // _CHAIN_BYTES

    def upsert(self, blocks: U64, names: int) -> U32:
        """Return the row of every block, made where there was none, with room made for ``names`` names as well."""
        self._clock += 1
        if self.sets.empty_rows:
            self._sweep_empty(_SWEEP_ROWS)
        if max(len(blocks), names) > self._easy_room:
            self._make_room(len(blocks), names)
        self._easy_room -= max(len(blocks), names)
        return self.table.upsert(blocks)

    def change(self, rows: U32, column: int, bits: int, *, add: bool) -> None:
        """Add ``bits`` to, or take them from, a column of every row's set; free rows that nobody is left in."""
        if not len(rows):
            return
        runs = self._loops.runs(self.set_numbers, self.stamps, rows, self._clock & _STAMP_MASK)
        if len(runs) > 2 and len(distinct := np.unique(rows)) < len(rows):
            self.change(distinct, column, bits, add=add)
            return
        stop = len(rows)
        for number, start in reversed(runs):
            after = self.sets.step(number, column, bits, add=add)
            if after != number:
                self._move(rows[start:stop], number, after)
            stop = start

    def _move(self, rows: U32, before: int, after: int) -> None:
        gone = np.unique(rows[self.set_numbers[rows] == before]) if after == NOBODY else None
        moved = self._loops.recode(self.set_numbers, rows, before, after)
        self.sets.move(before, after, moved)
        if gone is not None:
            self._free(gone)

    def _free(self, rows: U32) -> None:
        """Free distinct rows whose set is ``NOBODY`` already."""
        self.names.forget(rows, self.first_names)
        self.table.erase(rows)

    def has(self, rows: U32, column: int, bits: int) -> npt.NDArray[np.bool_]:
        """Tell for each row whether the holder in ``column`` has all of ``bits``."""
        numbers = self.set_numbers[rows]
        if not numbers.any():  # all are new, mostly: NOBODY has them
            return np.zeros(len(rows), np.bool_)
        found: npt.NDArray[np.bool_] = self.sets.presence[:, column].take(numbers) & bits == bits
        return found

    # --- names ---

    def bind(self, names: U64, rows: U32, *, rebind: bool) -> int:
        """Make names mean the blocks in ``rows``; return how many meant another block. See ``PrefixIndex.stored``."""
        clashing = self.names.bind(names, rows, self.first_names).tolist()
        clashes = 0
        for position in clashing:
            name, row = int(names[position]), int(rows[position])
            former = int(self.names.meant(names[position : position + 1])[0][0])
            empty = self.sets.is_empty(int(self.set_numbers[former]))
            clashes += not empty and former != row
            if rebind or empty:
                self.names.rebind(name, row, self.first_names)
        return clashes

    def meant(self, names: U64) -> tuple[U32, U32]:
        """Return the rows that names mean and the positions of those names; what nobody holds any more is left out."""
        rows, positions = self.names.meant(names)
        if self.sets.empty_rows:
            held = ~self.sets.empty()[self.set_numbers[rows]]
            rows, positions = rows[held], positions[held]
        return rows, positions

    def span(self, start: int, rows: int) -> tuple[U64, U64, U32]:
        """Return the blocks in the rows from ``start`` on, their names, and the numbers of their sets, parallel: a
        block stands once for each of its names, and in the order of rows."""
        stop = min(start + rows, self.table.used)
        live = np.arange(start, stop, dtype=np.uint32)
        live = live[self.set_numbers[start:stop] != NOBODY]
        names, positions = self.names.of(live, self.first_names)
        order = np.argsort(positions, kind="stable")
        owners = live[positions[order]]
        return self.table.keys[owners], names[order], self.set_numbers[owners]

    # --- matching ---

    def match(self, blocks: U64, columns: U32) -> I32:
        """Return (columns, 5): the leading run by fastest tier, then the blocks beyond it that are pending."""
        self._clock += 1
        counts = np.zeros((len(columns), TALLY_WIDTH), np.int32)
        sets, stamps, presence = self.set_numbers, self.stamps, self.sets.presence
        stamp, table = (self._clock + self._bonus) & _STAMP_MASK, self.table
        if isinstance(table, DictTable):
            tally(table.leading(blocks), sets, stamps, presence, columns, counts, stamp)
        else:
            _kernels.match(
                table.cells,
                table.old,
                table.keys,
                blocks,
                sets,
                stamps,
                presence,
                columns,
                counts,
                self.sets.width,
                stamp,
            )
        return counts

    # --- the budget ---

    def _make_room(self, blocks: int, names: int) -> None:
        while len(self.sets) >= self.sets.limit(int(self.byte_budget * _SET_SHARE)):
            self._evict(len(self.table) // 16 + 1)
        while not (self._grow(self.table, blocks) and self._grow(self.names.table, names)):
            self._evict(max(blocks, names))
        for table in (self.table, self.names.table):
            if table.is_crowded and self._affords(2 * table.search_bytes):
                table.double_cells()
        easy = min(self.table.easy_room(), self.names.table.easy_room(), _EASY_ROOM)
        self._easy_room = max(blocks, names, easy)

    def _grow(self, table: Table, count: int) -> bool:
        """Make room for ``count`` more rows if the budget allows; tell whether there is."""
        while not table.has_room(count):
            if table.needs_cells(count):
                if not self._affords(2 * table.search_bytes):
                    return False
                table.double_cells()
                continue
            wanted = max(int(table.capacity * _GROWTH), len(table) + count)
            columns = self.column_bytes if table is self.table else self.names.column_bytes
            more = (table.row_bytes + columns) * (wanted - table.capacity)
            if wanted > ROW_LIMIT or not self._affords(more):
                return False
            table.extend(wanted)
            self._extend_columns()
        return True

    def _extend_columns(self) -> None:
        self.names.extend()
        for column in (self.set_numbers, self.stamps, self.first_names):
            column.resize(self.table.capacity, refcheck=False)

    def _affords(self, more: int) -> bool:
        return self.nbytes - self.sets.nbytes + more <= self.byte_budget * _TABLE_SHARE

    def _evict(self, count: int) -> None:
        """Forget at least ``count`` of the blocks that were used longest ago, or all that there are."""
        count, freed = min(count, len(self.table)), 0
        for quantile in _EVICT_QUANTILES:
            cutoff = self._age_at(quantile) if quantile else -(2**31)
            self._bonus = max(0, cutoff // 2)
            for _ in range(-(-self.table.used // _SWEEP_ROWS) + 1):
                if freed >= count:
                    break
                freed += self._sweep(cutoff)
        self.evicted += freed

    def _age_at(self, quantile: float) -> int:
        """Return an age from an even sample of the blocks."""
        step = max(1, self.table.used // _SAMPLE_ROWS)
        sample = np.arange(self._hand % step, self.table.used, step)
        ages = self._ages(sample[self.set_numbers[sample] != NOBODY])
        return int(np.quantile(ages, quantile)) if len(ages) else 0

    def _ages(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        ages: I32 = (np.uint32(self._clock & _STAMP_MASK) - self.stamps[rows]).view(np.int32)
        return ages

    def _sweep(self, cutoff: int) -> int:
        """Move the hand over the next rows and forget those at least ``cutoff`` old; return how many."""
        rows = self._next_rows(_SWEEP_ROWS)
        return self._forget(rows[self._ages(rows) >= cutoff])

    def _sweep_empty(self, count: int) -> None:
        """Move the hand over the next rows and free those that clearings left to nobody."""
        rows = self._next_rows(count)
        self._forget(rows[self.sets.empty()[self.set_numbers[rows]]])

    def _next_rows(self, count: int) -> U32:
        if self._hand >= self.table.used:
            self._hand = 0
        stop = min(self._hand + count, self.table.used)
        rows = np.arange(self._hand, stop, dtype=np.uint32)
        self._hand = stop
        used: U32 = rows[self.set_numbers[rows] != NOBODY]
        return used

    def _forget(self, rows: U32) -> int:
        numbers = self.set_numbers[rows]
        for number in np.unique(numbers).tolist():
            self._move(rows[numbers == number], number, NOBODY)
        return len(rows)

    def check(self) -> None:
        """Verify every invariant of the parts and between them; raises ``AssertionError``."""
        live = self.table.live_rows()
        self.table.check()
        self.sets.check(self.set_numbers, live)
        free = np.setdiff1d(np.arange(self.table.capacity, dtype=np.uint32), live)
        assert not self.set_numbers[free].any(), "a free row has holders"
        self.names.check(self.first_names, live)
        assert self.nbytes <= self.byte_budget, "over budget"
        assert all(len(c) == self.table.capacity for c in (self.set_numbers, self.stamps, self.first_names))
