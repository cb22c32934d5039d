"""How many reservations beyond the first are about to bring a block to one holder: nothing at all, but for bursts.

A burst on one prefix reserves thousands of blocks again and again; so counts stand in a column beside a table of
blocks, and each call is a few passes in compiled loops.
"""

from __future__ import annotations

import numpy as np

from radix_index.base import HashArray
from radix_index.kernels import COMPILED, NO_ROW
from radix_index.table import DictTable, FlatTable, Table


class FurtherReservations:
    """Counts by block, of one holder. Blocks that are given in one call are distinct."""

    def __init__(self, *, compiled: bool = COMPILED is not None) -> None:
        self._table: Table = FlatTable() if compiled else DictTable()
        self._counts = np.zeros(self._table.capacity, np.int32)

    def __len__(self) -> int:
        return len(self._table)

    def add(self, blocks: HashArray) -> None:
        """One more reservation has these. O(blocks)."""
        self._table.make_room(len(blocks))
        missing = self._table.capacity - len(self._counts)
        if missing:
            self._counts = np.concatenate([self._counts, np.zeros(missing, np.int32)])
        self._counts[self._table.upsert(blocks)] += 1

    def take(self, blocks: HashArray) -> HashArray:
        """One reservation fewer has these; return those of them that no other one has. O(blocks)."""
        rows = self._table.find(blocks)
        known = rows != NO_ROW
        further = rows[known]
        self._counts[further] -= 1
        self._table.erase(further[self._counts[further] == 0])
        last: HashArray = blocks[~known]
        return last

    def check(self) -> None:
        """Verify the table and the counts; raises ``AssertionError``. O(blocks)."""
        self._table.check()
        live = self._table.live_rows()
        assert (self._counts[live] > 0).all()
        assert self._counts.sum() == self._counts[live].sum(), "a free row counts something"
