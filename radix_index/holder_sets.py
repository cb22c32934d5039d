"""Interned sets of holders: blocks of one chain have the same holders, so each block stores the number of a set.

A set is one byte a holder (a *column*): bits 0–3 say in which tiers the holder has the block (``1 << Tier``), bit 4
that a request routed there is about to bring it. Set 0 is nobody. What a match needs lies in ``presence``: the same
bytes, with the pool bit of a pool's column also set for every instance that reads from that pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from radix_index.kernels import PENDING_BIT, STORED_BITS, U8, U32

NOBODY = 0
ALL_BITS = STORED_BITS | PENDING_BIT
POOL_BIT = 8
_SET_BYTES = 300
"""What a set costs besides its presence row: its bytes, dictionary and list entries (CPython 3.11, rounded up)."""

_STEP_LIMIT = 65_536


class HolderSets:
    """Numbered sets with the number of rows in each; a set that no row is in is given back."""

    def __init__(self, columns: int = 8) -> None:
        self.width = columns
        self.presence: U8 = np.zeros((64, columns), np.uint8)
        self.empty_rows = 0  # rows in sets that were cleared to nobody and are not NOBODY: to be freed in passing
        self._bytes: list[bytes] = [bytes(columns)]
        self._rows: list[int] = [0]
        self._numbers: dict[bytes, int] = {bytes(columns): NOBODY}
        self._free: list[int] = []
        self._steps: dict[tuple[int, int, int, bool], int] = {}
        self._readers: U32 = np.zeros(0, np.uint32)  # columns of instances that have a pool …
        self._pools: U32 = np.zeros(0, np.uint32)  # … and the columns of their pools

    def __len__(self) -> int:
        return len(self._bytes) - len(self._free) - 1

    @property
    def nbytes(self) -> int:
        """Bytes used, about."""
        return self.presence.nbytes + len(self) * (_SET_BYTES + self.width)

    def limit(self, bytes_allowed: int) -> int:
        """Return how many sets fit into so many bytes, presence doubled ahead of need."""
        return max(1, bytes_allowed // (_SET_BYTES + 3 * self.width))

    def bits(self, number: int, column: int) -> int:
        """Return what the holder in ``column`` has in this set."""
        return self._bytes[number][column]

    def members(self, number: int, columns: Mapping[int, str]) -> list[tuple[str, int]]:
        """Return which holders of ``columns`` are in this set, each with its tiers' bits. O(members)."""
        stored = np.frombuffer(self._bytes[number], np.uint8) & STORED_BITS
        held = np.flatnonzero(stored)
        pairs = zip(held.tolist(), stored[held].tolist(), strict=True)
        return [(columns[column], bits) for column, bits in pairs if column in columns]

    def rows(self, number: int) -> int:
        """Return how many rows are in this set."""
        return self._rows[number]

    def is_empty(self, number: int) -> bool:
        """Tell whether nobody is in this set."""
        return not any(self._bytes[number])

    def empty(self) -> npt.NDArray[np.bool_]:
        """Tell for every number whether nobody is in that set. O(sets)."""
        return np.logical_not(self.presence[: len(self._bytes)].any(axis=1))

    def step(self, number: int, column: int, bits: int, *, add: bool) -> int:
        """Return the set with ``bits`` added to, or taken from, a column. O(1) once it is known."""
        key = (number, column, bits, add)
        found = self._steps.get(key)
        if found is None:
            before = self._bytes[number]
            after = before[column] | bits if add else before[column] & ~bits
            found = number if after == before[column] else self._intern(before, column, after)
            if len(self._steps) >= _STEP_LIMIT:
                self._steps.clear()
            self._steps[key] = found
        return found

    def _intern(self, before: bytes, column: int, bits: int) -> int:
        content = before[:column] + bytes((bits,)) + before[column + 1 :]
        found = self._numbers.get(content)
        if found is not None:
            return found
        if self._free:
            number = self._free.pop()
            self._bytes[number], self._rows[number] = content, 0
        else:
            number = len(self._bytes)
            self._bytes.append(content)
            self._rows.append(0)
            if number == len(self.presence):
                self.presence = np.concatenate([self.presence, np.zeros_like(self.presence)])
        self._numbers[content] = number
        self._present(number)
        return number

    def _present(self, number: int) -> None:
        row = self.presence[number]
        row[:] = np.frombuffer(self._bytes[number], np.uint8)
        if len(self._readers):
            row[self._readers] |= row[self._pools] & POOL_BIT

    def move(self, before: int, after: int, rows: int) -> None:
        """Count ``rows`` rows out of one set and into another."""
        self._rows[after] += rows
        self._rows[before] -= rows
        if before != NOBODY and not any(self._bytes[before]):
            self.empty_rows -= rows
        for number in (before, after):
            if number != NOBODY and self._rows[number] == 0:
                self._give_back(number)

    def _give_back(self, number: int) -> None:
        content = self._bytes[number]
        if self._numbers.get(content) == number:
            del self._numbers[content]
        self._free.append(number)
        self._steps.clear()

    def live(self) -> Iterator[int]:
        """Go through the numbers of the sets in use, ``NOBODY`` left out."""
        return (number for number in range(1, len(self._bytes)) if self._rows[number])

    def clear(self, column: int, bits: int) -> None:
        """Take ``bits`` from a column in every set. O(sets), not rows. Sets may become equal; they stay apart."""
        self._steps.clear()
        touched = np.flatnonzero(self.presence[: len(self._bytes), column] & bits).tolist()
        for number in touched:
            before = self._bytes[number]
            if not self._rows[number] or not before[column] & bits:
                continue
            if self._numbers.get(before) == number:
                del self._numbers[before]
            content = before[:column] + bytes((before[column] & ~bits,)) + before[column + 1 :]
            self._bytes[number] = content
            self._numbers.setdefault(content, number)
            self._present(number)
            if not any(content):
                self.empty_rows += self._rows[number]

    def set_pools(self, pools: dict[int, int]) -> None:
        """Say which columns read from which pools' columns. O(sets)."""
        self._readers = np.array(list(pools), np.uint32)
        self._pools = np.array(list(pools.values()), np.uint32)
        for number in range(len(self._bytes)):
            self._present(number)

    def widen(self, columns: int) -> None:
        """Make room for more columns. O(sets)."""
        padding = bytes(columns - self.width)
        self._bytes = [content + padding for content in self._bytes]
        self._numbers = {content + padding: number for content, number in self._numbers.items()}
        self.presence = np.zeros((len(self.presence), columns), np.uint8)
        self.width = columns
        for number in range(len(self._bytes)):
            self._present(number)

    def check(self, sets: U32, live: U32) -> None:
        """Verify the counts against ``sets[live]``, the set of every row in use, and the numbering."""
        counts = np.bincount(sets[live], minlength=len(self._bytes))
        assert counts[NOBODY] == 0, "a row in use is in no set"
        in_use = {number: int(counts[number]) for number in np.flatnonzero(counts).tolist()}
        assert in_use == {number: self._rows[number] for number in self.live()}, "rows are miscounted"
        assert self.empty_rows == sum(n for number, n in in_use.items() if self.is_empty(number))
        for content, number in self._numbers.items():
            assert self._bytes[number] == content, "a set is found under another's content"
            assert number == NOBODY or self._rows[number], "a set that nobody is in was kept"
        presence = self.presence.copy()
        for number in range(len(self._bytes)):
            self._present(number)
        assert np.array_equal(presence, self.presence), "presence is out of date"
