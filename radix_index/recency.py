"""Which of many blocks were used longest ago, when they are used a whole prompt at a time.

An ordered dictionary would be moved about in once for each block; here a prompt of thousands of blocks is one call into
compiled loops. Each use is a *generation*: the rows that it touched, in the order in which they would go. A row belongs
to the generation whose clock stands in its column, and is passed over in all earlier ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radix_index.base import HashArray
from radix_index.kernels import COMPILED, U32
from radix_index.table import DictTable, FlatTable, Table

Uses = npt.NDArray[np.int64]
_SPARE_ROWS = 1 << 14
_NEVER = 0


@dataclass(slots=True)
class _Generation:
    clock: int
    rows: U32


class Recency:
    """Blocks in the exact order of their last use; of one use the last block is the oldest. Clocks begin at 1."""

    def __init__(self, *, compiled: bool = COMPILED is not None) -> None:
        self._table: Table = FlatTable() if compiled else DictTable()
        self._uses = self._no_uses()
        self._generations: deque[_Generation] = deque()
        self._queued = 0  # rows in all generations

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, block: int) -> bool:
        return bool(self.uses(np.array([block], np.uint64))[0])

    def uses(self, blocks: HashArray) -> Uses:
        """Return when each block was last used; 0 for those that are not there."""
        return self._uses.take(self._table.find(blocks), mode="clip")  # which makes the last row of NO_ROW

    def touch(self, blocks: HashArray, clock: int) -> Uses:
        """The blocks are used now; return what ``uses`` would have said. ``clock`` must be later than all before."""
        self._make_room(len(blocks))
        rows = self._table.upsert(blocks)
        before = self._uses.take(rows, mode="clip")
        self._uses[rows.astype(np.intp)] = clock
        self._generations.append(_Generation(clock, rows[::-1]))
        self._queued += len(rows)
        if self._queued > 4 * len(self._table) + _SPARE_ROWS:
            self._pass_over()
        return before

    def pop_oldest(self, count: int) -> HashArray:
        """Take out so many blocks, those whose last use is longest ago; return them."""
        taken: list[U32] = []
        while count > 0 and self._generations:
            oldest = self._generations[0]
            rows = self._live(oldest)
            self._queued -= len(oldest.rows)
            if len(rows) <= count:
                self._generations.popleft()
            else:
                oldest.rows = rows[count:]
                self._queued += len(oldest.rows)
                rows = rows[:count]
            self._uses[rows] = _NEVER
            taken.append(rows)
            count -= len(rows)
        return self._erase(taken)

    def pop_until(self, clock: int) -> HashArray:
        """Take out all blocks that were last used at ``clock`` or before; return them."""
        taken: list[U32] = []
        while self._generations and self._generations[0].clock <= clock:
            oldest = self._generations.popleft()
            self._queued -= len(oldest.rows)
            rows = self._live(oldest)
            self._uses[rows] = _NEVER
            taken.append(rows)
        return self._erase(taken)

    def clear(self) -> None:
        """Forget everything."""
        self._table = type(self._table)()
        self._uses = self._no_uses()
        self._generations.clear()
        self._queued = 0

    def check(self) -> None:
        """Verify the table and that each block stands in its generation; raises ``AssertionError``. O(blocks)."""
        self._table.check()
        live = self._table.live_rows()
        standing = [rows for each in self._generations if len(rows := self._live(each))]
        assert np.array_equal(np.sort(np.concatenate(standing)) if standing else live[:0], live)
        clocks = [each.clock for each in self._generations]
        assert clocks == sorted(set(clocks))
        assert self._queued == sum(len(each.rows) for each in self._generations)

    def _live(self, generation: _Generation) -> U32:
        """Return the rows that were not used since, each once."""
        rows: U32 = generation.rows[self._uses.take(generation.rows, mode="clip") == generation.clock]
        if len(rows) > 1:  # their uses are known, so that their column can hold for a moment where each comes first
            at, places = rows.astype(np.intp), np.arange(len(rows))
            self._uses[at[::-1]] = places[::-1]  # of a row that comes twice the last assignment stays
            is_first = self._uses[at] == places
            self._uses[at] = generation.clock
            rows = rows[is_first]
        return rows

    def _erase(self, taken: list[U32]) -> HashArray:
        if not taken:
            return np.empty(0, np.uint64)
        rows = np.concatenate(taken)
        blocks: HashArray = self._table.keys[rows].copy()
        self._table.erase(rows)
        return blocks

    def _pass_over(self) -> None:
        """Drop what later generations have taken over."""
        kept = [_Generation(each.clock, self._live(each)) for each in self._generations]
        self._generations = deque(each for each in kept if len(each.rows))
        self._queued = sum(len(each.rows) for each in self._generations)

    def _make_room(self, count: int) -> None:
        self._table.make_room(count)
        missing = self._table.capacity + 1 - len(self._uses)
        if missing:
            self._uses = np.concatenate([self._uses, np.zeros(missing, np.int64)])

    def _no_uses(self) -> Uses:
        """Return the column of clocks, or _NEVER, by row; and one row more, in which nothing ever is."""
        return np.zeros(self._table.capacity + 1, np.int64)
