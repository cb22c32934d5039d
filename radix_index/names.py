"""Aliases: what sources call their blocks, each name leading to one block and living as long as it does."""

from __future__ import annotations

import numpy as np

from radix_index.kernels import NO_ROW, U32, U64, Loops
from radix_index.table import Table


class Names:
    """Names by row, with the row of the block that each means (``owners``, plus 1) and the block's next name.

    The head of each block's list is kept by the caller, in ``first``, a column beside its blocks.
    """

    column_bytes = 8
    """Bytes a row takes beside the table's."""

    def __init__(self, table: Table, loops: Loops) -> None:
        self.table, self._loops = table, loops
        self.owners: U32 = np.zeros(table.capacity, np.uint32)
        self.following: U32 = np.zeros(table.capacity, np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.table.nbytes + self.owners.nbytes + self.following.nbytes

    def extend(self) -> None:
        """Extend the columns to the table's new capacity."""
        self.owners.resize(self.table.capacity, refcheck=False)
        self.following.resize(self.table.capacity, refcheck=False)

    def bind(self, names: U64, blocks: U32, first: U32) -> U32:
        """Make each name that means nothing yet mean the block beside it. Returns the positions of the others that
        mean another block. The caller has made room."""
        rows = self.table.upsert(names)
        if not self._loops.bind(self.owners, self.following, first, rows, blocks):
            return rows[:0]
        return np.flatnonzero(self.owners[rows] != blocks + 1).astype(np.uint32)

    def rebind(self, name: int, block: int, first: U32) -> None:
        """Make a known name mean another block. O(names of the block that it meant)."""
        row = int(self.table.find(np.array([name], np.uint64))[0])
        former = int(self.owners[row]) - 1
        after = int(self.following[row])
        if first[former] == row + 1:
            first[former] = after
        else:
            before = int(first[former]) - 1
            while self.following[before] != row + 1:
                before = int(self.following[before]) - 1
            self.following[before] = after
        self.owners[row], self.following[row] = block + 1, first[block]
        first[block] = row + 1

    def meant(self, names: U64) -> tuple[U32, U32]:
        """Return the blocks that names mean, and the positions of those names. Unknown names are left out."""
        rows = self.table.find(names)
        known = np.flatnonzero(rows != NO_ROW)
        return self.owners[rows[known]] - 1, known.astype(np.uint32)

    def of(self, blocks: U32, first: U32) -> tuple[U64, U32]:
        """Return every name of ``blocks``, and the position in ``blocks`` of what each means. O(their names)."""
        positions = np.arange(len(blocks), dtype=np.uint32)
        links, names, owners = first[blocks], [], []
        while True:
            named = links > 0
            links, positions = links[named], positions[named]
            if not len(links):
                break
            names.append(self.table.keys[links - 1])
            owners.append(positions)
            links = self.following[links - 1]
        if not names:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        return np.concatenate(names), np.concatenate(owners)

    def forget(self, blocks: U32, first: U32) -> None:
        """Free every name of distinct ``blocks``. O(their names)."""
        heads, lists = first[blocks], []
        while len(heads := heads[heads > 0]):
            lists.append(heads - 1)
            heads = self.following[heads - 1]
        if lists:
            rows = np.concatenate(lists)
            self.table.erase(rows)
            self.owners[rows] = 0
            self.following[rows] = 0
        first[blocks] = 0

    def check(self, first: U32, blocks: U32) -> None:
        """Verify that the lists of ``blocks``, all that are in use, hold every name once, with the right owner."""
        self.table.check()
        assert len(self.owners) == len(self.following) == self.table.capacity
        seen = []
        for block in blocks.tolist():
            link = int(first[block])
            while link:
                assert self.owners[link - 1] == block + 1, "a name is in another block's list"
                seen.append(link - 1)
                link = int(self.following[link - 1])
        assert sorted(seen) == self.table.live_rows().tolist(), "lists and names in use disagree"
