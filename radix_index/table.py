"""Tables from 64-bit keys to row numbers. Columns of the caller's stand beside ``keys``, by row number."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from radix_index.kernels import NO_ROW, U32, U64

try:
    from radix_index import _kernels
except ImportError:
    pass

MAX_LOAD = 0.8
"""Fill at which a table doubles its cells, if it may."""

FULL = 0.94
"""Fill beyond which nothing is added."""

ROW_BITS = 26
ROW_LIMIT = 2**ROW_BITS - 2
"""The most rows of a table: a cell has 26 bits for them."""

EMPTY, ERASED = 0, 0xFFFF_FFFF
_GROWTH = 1.5
_NONE: U32 = np.zeros(0, np.uint32)
_MIGRATED_A_KEY = 16  # old cells drained for every key added while growing: two places to look in, but not for long


class Table(ABC):
    """Rows numbered from 0, each with a distinct key; a free row's key is 0.

    New rows are neighbours never used before while there are any, else those freed last.
    """

    def __init__(self, rows: int = 256) -> None:
        self.keys: U64 = np.zeros(rows, np.uint64)
        self.used = 0  # rows ever handed out; those below that are free again are on the stack
        self._free: U32 = np.zeros(rows, np.uint32)
        self._free_count = 0

    def __len__(self) -> int:
        return self.used - self._free_count

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self._free.nbytes + self.search_bytes

    @property
    @abstractmethod
    def search_bytes(self) -> int:
        """Bytes of what leads from a key to its row."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """What room for one more row takes, without the caller's columns."""

    @property
    def capacity(self) -> int:
        """Rows that there is room for without ``extend``."""
        return len(self.keys)

    @abstractmethod
    def find(self, keys: U64) -> U32:
        """Return the row of each key, or ``NO_ROW``."""

    @abstractmethod
    def upsert(self, keys: U64) -> U32:
        """Return the row of each key, made where there was none. The caller has made room."""

    def erase(self, rows: U32) -> None:
        """Free distinct ``rows``."""
        self._unlink(rows)
        self.keys[rows] = 0
        self._free[self._free_count : self._free_count + len(rows)] = rows[::-1]
        self._free_count += len(rows)

    @abstractmethod
    def _unlink(self, rows: U32) -> None:
        """Make the keys of ``rows`` lead nowhere."""

    def _took(self, count: int) -> None:
        fresh = min(count, len(self.keys) - self.used)
        self.used += fresh
        self._free_count -= count - fresh

    def has_room(self, count: int) -> bool:
        """Tell whether ``count`` keys can be added."""
        return len(self.keys) - len(self) >= count and not self.needs_cells(count)

    def needs_cells(self, count: int) -> bool:
        """Tell whether ``count`` more keys need ``double_cells`` first."""
        return False

    @property
    def is_crowded(self) -> bool:
        """Whether ``double_cells`` would be good."""
        return False

    def double_cells(self) -> None:
        """Give the search room to stay short. Never asked of a table that needs no cells."""
        raise NotImplementedError

    def easy_room(self) -> int:
        """Return how many keys can be added before anything about room must be thought of."""
        return len(self.keys) - len(self)

    def extend(self, rows: int) -> None:
        """Make room for ``rows`` rows in all, in place."""
        self.keys.resize(rows, refcheck=False)
        self._free.resize(rows, refcheck=False)

    def make_room(self, count: int) -> None:
        """Grow until ``count`` keys can be added, and are found quickly. Heeds no budget."""
        while not self.has_room(count):
            if self.needs_cells(count):
                self.double_cells()
            else:
                self.extend(max(int(self.capacity * _GROWTH), len(self) + count))
        if self.is_crowded:
            self.double_cells()

    def live_rows(self) -> U32:
        """Return the rows in use, ascending. O(rows). For checks."""
        rows = np.ones(self.used, bool)
        rows[self._free[: self._free_count]] = False
        return np.flatnonzero(rows).astype(np.uint32)

    def check(self) -> None:
        """Verify that every live key, and nothing else, is found in its row; raises ``AssertionError``."""
        live = self.live_rows()
        assert len(live) == len(self)
        assert np.array_equal(self.find(self.keys[live]), live), "a key is not found in its own row"
        free = self._free[: self._free_count]
        assert len(np.unique(free)) == len(free), "a row is free twice"
        assert not self.keys[free].any(), "a free row has a key"
        assert np.array_equal(np.sort(self._linked()), live), "a row that is not in use can be found"

    @abstractmethod
    def _linked(self) -> U32:
        """Return every row that some key leads to."""


class FlatTable(Table):
    """Open addressing over ``uint32`` cells, in compiled loops (``_kernels.c``).

    A cell is 0 when empty, ``ERASED`` when it was used, else six bits of the key's hash over the row's number plus 1;
    those bits spare most looks at keys of other cells, each a cache miss. Growing never moves much at once: ``keys``
    is extended in place, and while cells double there are two arrays, ``old`` being drained into ``cells`` with every
    insertion.
    """

    row_bytes = 8 + 4

    def __init__(self, rows: int = 256) -> None:
        super().__init__(rows)
        self.cells: U32 = np.zeros(_power_of_two_over(rows / MAX_LOAD), np.uint32)
        self.old: U32 = _NONE
        self._drained = 0

    @property
    def search_bytes(self) -> int:
        """See ``Table.search_bytes``."""
        return self.cells.nbytes + self.old.nbytes

    @property
    def is_crowded(self) -> bool:
        """See ``Table.is_crowded``."""
        return len(self) > MAX_LOAD * len(self.cells)

    def needs_cells(self, count: int) -> bool:
        """See ``Table.needs_cells``."""
        return len(self) + count > FULL * len(self.cells)

    def easy_room(self) -> int:
        """See ``Table.easy_room``."""
        return max(0, min(len(self.keys), int(MAX_LOAD * len(self.cells))) - len(self))

    def find(self, keys: U64) -> U32:
        """See ``Table.find``."""
        rows = np.empty(len(keys), np.uint32)
        _kernels.find(self.cells, self.old, self.keys, keys, rows)
        return rows

    def upsert(self, keys: U64) -> U32:
        """See ``Table.upsert``."""
        rows = np.empty(len(keys), np.uint32)
        taken = _kernels.upsert(self.cells, self.old, self.keys, keys, self._free, rows, self.used, self._free_count)
        self._took(taken)
        if taken and len(self.old):
            self._drain(taken * _MIGRATED_A_KEY)
        return rows

    def _unlink(self, rows: U32) -> None:
        _kernels.erase(self.cells, self.old, self.keys, rows)

    def double_cells(self) -> None:
        """Begin to move to twice as many cells."""
        self._drain(len(self.old))
        self.old, self.cells, self._drained = self.cells, np.zeros(2 * len(self.cells), np.uint32), 0

    def _drain(self, count: int) -> None:
        stop = min(len(self.old), self._drained + count)
        _kernels.migrate(self.cells, self.old, self.keys, self._drained, stop)
        self._drained = stop
        if stop == len(self.old):
            self.old, self._drained = _NONE, 0

    def _linked(self) -> U32:
        cells = np.concatenate([self.cells, self.old[self._drained :]])
        cells = cells[(cells != EMPTY) & (cells != ERASED)]
        rows: U32 = (cells & np.uint32(2**ROW_BITS - 1)) - np.uint32(1)
        return rows


class DictTable(Table):
    """A dictionary leads from key to row: quick without a compiler, and three times the memory."""

    entry_bytes = 180
    """A dictionary entry with its two integers, at the emptiest that CPython 3.11 leaves a growing dictionary."""

    row_bytes = 8 + 4 + entry_bytes

    def __init__(self, rows: int = 256) -> None:
        super().__init__(rows)
        self._rows: dict[int, int] = {}

    @property
    def search_bytes(self) -> int:
        """See ``Table.search_bytes``: for a full table, since a dictionary grows when it likes."""
        return self.entry_bytes * self.capacity

    def find(self, keys: U64) -> U32:
        """See ``Table.find``."""
        rows = self._rows
        return np.array([rows.get(key, NO_ROW) for key in keys.tolist()], np.uint32)

    def leading(self, keys: U64) -> U32:
        """Return the rows of the leading keys that are known."""
        rows: list[int] = []
        for key in keys.tolist():
            if (row := self._rows.get(key)) is None:
                break
            rows.append(row)
        return np.array(rows, np.uint32)

    def upsert(self, keys: U64) -> U32:
        """See ``Table.upsert``."""
        rows, known = [], self._rows
        for key in keys.tolist():
            row = known.get(key)
            if row is None:
                row = known[key] = self._take()
                self.keys[row] = key
            rows.append(row)
        return np.array(rows, np.uint32)

    def _take(self) -> int:
        row = self.used if self.used < len(self.keys) else int(self._free[self._free_count - 1])
        self._took(1)
        return row

    def _unlink(self, rows: U32) -> None:
        for key in self.keys[rows].tolist():
            del self._rows[key]

    def _linked(self) -> U32:
        return np.array(list(self._rows.values()), np.uint32)


def _power_of_two_over(size: float) -> int:
    return 1 << max(4, int(size).bit_length())
