"""The branches of a tree whose edges are bytes: which of them does a text take?

Branches are told apart by their length and 128 bits of their bytes, and nobody knows the length of the one to take. So
each is also known by 64 bits of its first bytes, as many as the greatest power of two that it has: texts have few such
sizes, and branches of one size that begin alike are few, mostly; those differ in their last bytes. A branch is found
among thousands by a hash for each size and one more.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

Node = TypeVar("Node")

_TAIL_BYTES = 16
_MOST_ALIKE = 1024
"""Branches that begin alike of which the end is looked at."""


class Key(NamedTuple):
    """What a branch is known by."""

    length: int
    digest: int
    beginning: int
    tail: bytes

    @classmethod
    def of(cls, data: memoryview) -> Key:
        """Return what these bytes, at least one, are known by. O(bytes)."""
        length = len(data)
        beginning = xxh3_64_intdigest(data[: _beginning_bytes(length)])
        return cls(length, xxh3_128_intdigest(data), beginning, bytes(data[-_TAIL_BYTES:]))


class Edges(Generic[Node]):
    """Branches and where they lead. A single one, as nearly everywhere, needs no order."""

    __slots__ = ("_alike", "_nodes", "_single", "_sizes")

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], Node] = {}
        self._single: Key | None = None  # of the first branch, until another one comes; from then on:
        self._alike: dict[tuple[int, int], dict[tuple[int, bytes], int]] | None = None  # by size and digest
        self._sizes: dict[int, int] = {}  # of beginnings, and how many branches have them

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: Key) -> Node | None:
        """Return where a branch leads."""
        return self._nodes.get(key[:2])

    def put(self, key: Key, node: Node) -> None:
        """Add a branch that is not there."""
        self._nodes[key[:2]] = node
        if self._alike is None and len(self._nodes) == 1:
            self._single = key
            return
        if self._alike is None:
            self._alike, single, self._single = {}, self._single, None
            assert single is not None
            self._order(self._alike, single)
        self._order(self._alike, key)

    def _order(self, alike: dict[tuple[int, int], dict[tuple[int, bytes], int]], key: Key) -> None:
        size, end = _beginning_bytes(key.length), (key.length, key.tail)
        self._sizes[size] = self._sizes.get(size, 0) + 1
        ends = alike.setdefault((size, key.beginning), {})
        ends[end] = ends.get(end, 0) + 1

    def remove(self, key: Key) -> None:
        """Take out a branch that is there."""
        size, end = _beginning_bytes(key.length), (key.length, key.tail)
        del self._nodes[key[:2]]
        if self._alike is None:
            self._single = None
            return
        ends = self._alike[size, key.beginning]
        _count_down(ends, end)
        if not ends:
            del self._alike[size, key.beginning]
        _count_down(self._sizes, size)

    def ahead(self, view: memoryview, at: int) -> Node | None:
        """Return where the branch leads that the text takes at ``at``, if something follows it."""
        left, nodes = len(view) - at, self._nodes
        if len(nodes) == 1:
            ((length, digest),) = nodes
            is_taken = length < left and xxh3_128_intdigest(view[at : at + length]) == digest
            return nodes[length, digest] if is_taken else None
        if self._alike is None:
            return None
        for size in self._sizes:
            if size >= left:
                continue
            ends: Iterable[tuple[int, bytes]] = self._alike.get((size, xxh3_64_intdigest(view[at : at + size])), ())
            for length, tail in islice(ends, _MOST_ALIKE):
                end = at + length
                if length < left and view[end - len(tail) : end] == tail:
                    node = nodes.get((length, xxh3_128_intdigest(view[at:end])))
                    if node is not None:
                        return node
        return None


def _beginning_bytes(length: int) -> int:
    return 1 << length.bit_length() - 1


_T = TypeVar("_T")


def _count_down(counts: dict[_T, int], what: _T) -> None:
    if counts[what] == 1:
        del counts[what]
    else:
        counts[what] -= 1
