"""An open-addressing table from 64-bit keys to row numbers that grows without stopping the world."""

from __future__ import annotations

import numpy as np

from radix_index import kernels
from radix_index.kernels import U32, U64

MAX_LOAD = 0.8
"""Fill at which a table doubles its cells, if it may."""

FULL = 0.94
"""Fill beyond which nothing is added."""

_NONE: U32 = np.zeros(0, np.uint32)
_MIGRATED_A_KEY = 2  # old cells drained for every key added while growing: done before the next growth is due


class KeyTable:
    """Rows numbered from 0, each with a distinct key. Columns of the caller's stand beside ``keys``, by row number.

    Growing never copies much at once: ``keys`` is extended in place, cells are moved a few for every insertion.
    """

    row_bytes = 8 + 4 + 12
    """Bytes a row takes, those of the caller's columns included, cells apart."""

    def __init__(self, rows: int = 256) -> None:
        self.keys: U64 = np.zeros(rows, np.uint64)
        self.cells: U32 = np.zeros(_power_of_two_over(rows / MAX_LOAD), np.uint32)
        self.old: U32 = _NONE
        self.used = 0  # rows ever handed out; those below that are free again are on the stack
        self._drained = 0
        self._free: U32 = np.zeros(rows, np.uint32)
        self._free_count = 0

    def __len__(self) -> int:
        return self.used - self._free_count

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.cells.nbytes + self.old.nbytes + self._free.nbytes

    @property
    def capacity(self) -> int:
        """Rows that there is room for without ``extend``."""
        return len(self.keys)

    @property
    def is_crowded(self) -> bool:
        """Whether the cells should be doubled."""
        return len(self) > MAX_LOAD * len(self.cells)

    def find(self, keys: U64) -> U32:
        """Return the row of each key, or ``NO_ROW``."""
        rows = np.empty(len(keys), np.uint32)
        kernels.find(self.cells, self.old, self.keys, keys, rows)
        return rows

    def upsert(self, keys: U64) -> U32:
        """Return the row of each key, made where there was none. The caller has made room.

        New rows are neighbours never used before while there are any, else those freed last.
        """
        rows = np.empty(len(keys), np.uint32)
        taken = kernels.upsert(self.cells, self.old, self.keys, keys, self._free, rows, self.used, self._free_count)
        fresh = min(taken, len(self.keys) - self.used)
        self.used += fresh
        self._free_count -= taken - fresh
        if taken and len(self.old):
            self._drain(taken * _MIGRATED_A_KEY)
        return rows

    def erase(self, rows: U32) -> None:
        """Free distinct ``rows``."""
        kernels.erase(self.cells, self.old, self.keys, rows)
        self.keys[rows] = 0
        self._free[self._free_count : self._free_count + len(rows)] = rows[::-1]
        self._free_count += len(rows)

    def has_room(self, count: int) -> bool:
        """Tell whether ``count`` keys can be added."""
        return len(self.keys) - len(self) >= count and not self.needs_cells(count)

    def needs_cells(self, count: int) -> bool:
        """Tell whether ``count`` more keys would fill the cells so far that searches grow long."""
        return len(self) + count > FULL * len(self.cells)

    def easy_room(self) -> int:
        """Return how many keys can be added before anything about room must be thought of."""
        return max(0, min(len(self.keys), int(MAX_LOAD * len(self.cells))) - len(self))

    def extend(self, rows: int) -> None:
        """Make room for ``rows`` rows in all, in place."""
        self.keys.resize(rows, refcheck=False)
        self._free.resize(rows, refcheck=False)

    def double_cells(self) -> None:
        """Begin to move to twice as many cells."""
        self._drain(len(self.old))
        self.old, self.cells, self._drained = self.cells, np.zeros(2 * len(self.cells), np.uint32), 0

    def _drain(self, count: int) -> None:
        stop = min(len(self.old), self._drained + count)
        kernels.migrate(self.cells, self.old, self.keys, self._drained, stop)
        self._drained = stop
        if stop == len(self.old):
            self.old, self._drained = _NONE, 0

    def live_rows(self) -> U32:
        """Return the rows in use, ascending. O(rows). For checks."""
        rows = np.ones(self.used, bool)
        rows[self._free[: self._free_count]] = False
        return np.flatnonzero(rows).astype(np.uint32)

    def check(self) -> None:
        """Verify that every live key, and nothing else, is found in its row."""
        live = self.live_rows()
        assert len(live) == len(self)
        assert np.array_equal(self.find(self.keys[live]), live), "a key is not found in its own row"
        free = self._free[: self._free_count]
        assert len(np.unique(free)) == len(free), "a row is free twice"
        assert not self.keys[free].any(), "a free row has a key"
        cells = np.concatenate([self.cells, self.old[self._drained :]])
        cells = cells[(cells != kernels.EMPTY) & (cells != kernels.ERASED)]
        rows = np.sort(cells & np.uint32(2**kernels.ROW_BITS - 1)) - 1
        assert np.array_equal(rows, live), "cells and rows disagree"


def _power_of_two_over(size: float) -> int:
    return 1 << max(4, int(size).bit_length())
