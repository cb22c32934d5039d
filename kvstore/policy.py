"""Which page goes first. Policies are pure: no clock, no I/O, no locks, no bytes; so they can be replayed on traces.

A page is *in use* while somebody reads, writes or pins it, and *resting* otherwise. Only resting pages may be victims,
and a page whose successor is still there is one only when nothing else rests: a prefix is worth more than its suffix,
and without its prefix a page is worth nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class EvictionPolicy(Protocol[KeyT]):
    """The order in which one tier gives up its pages. Every method is O(1) amortised."""

    def __len__(self) -> int:
        """How many pages rest."""

    def add(self, key: KeyT, parent: KeyT | None) -> None:
        """A page arrived; it is in use. ``parent`` is the page of the block before it, present or not."""

    def use(self, key: KeyT) -> None:
        """A page that is present is wanted: a hit. It is in use until ``rest``."""

    def hold(self, key: KeyT) -> None:
        """A page that is present is in use until ``rest``, and is not wanted for it: it is copied, or looked at."""

    def rest(self, key: KeyT) -> None:
        """Nobody uses the page any more."""

    def retire(self, key: KeyT) -> None:
        """Nobody will want the page again, as far as is known: its run has ended. If it rests, it goes first."""

    def discard(self, key: KeyT) -> None:
        """The page is gone, evicted or removed."""

    def victim(self) -> KeyT | None:
        """Return the resting page to give up next, or ``None``. The caller discards it."""


class Succession(Generic[KeyT]):
    """Which pages have successors that are present: what every policy must know that lets a suffix go first."""

    def __init__(self) -> None:
        self.successors: dict[KeyT, int] = {}  # how many each page has that has any; to be read
        self._parents: dict[KeyT, KeyT | None] = {}

    def add(self, key: KeyT, parent: KeyT | None) -> None:
        """A page arrived."""
        self._parents[key] = parent
        if parent is not None:
            self.successors[parent] = self.successors.get(parent, 0) + 1

    def discard(self, key: KeyT) -> KeyT | None:
        """A page is gone; return the one that has no successor any more because of it, present or not."""
        parent = self._parents.pop(key)
        if parent is None:
            return None
        left = self.successors[parent] - 1
        if left:
            self.successors[parent] = left
            return None
        del self.successors[parent]
        return parent


class PrefixLru(Generic[KeyT]):
    """Least recently used, suffix before prefix.

    A resting page that comes up while a successor is present steps aside, and comes back as the oldest once its last
    successor is gone. Each page steps aside at most once for each time that it comes to rest.
    """

    def __init__(self) -> None:
        self._succession: Succession[KeyT] = Succession()
        self._successors = self._succession.successors
        self._queue: OrderedDict[KeyT, None] = OrderedDict()  # resting, oldest first
        self._aside: OrderedDict[KeyT, None] = OrderedDict()  # resting, came up while a successor was present

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def add(self, key: KeyT, parent: KeyT | None) -> None:
        """See ``EvictionPolicy``."""
        self._succession.add(key, parent)

    def use(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        self._queue.pop(key, None)
        self._aside.pop(key, None)

    def hold(self, key: KeyT) -> None:
        """See ``EvictionPolicy``. It comes to rest as the most recent all the same."""
        self.use(key)

    def rest(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        self._queue[key] = None

    def retire(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        if key in self._queue:
            self._queue.move_to_end(key, last=False)

    def discard(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        self.use(key)
        end = self._succession.discard(key)
        if end is not None and end in self._aside:
            del self._aside[end]
            self._queue[end] = None
            self._queue.move_to_end(end, last=False)

    def victim(self) -> KeyT | None:
        """See ``EvictionPolicy``."""
        while self._queue:
            key = next(iter(self._queue))
            if key not in self._successors:
                return key
            del self._queue[key]
            self._aside[key] = None
        return next(iter(self._aside), None)
