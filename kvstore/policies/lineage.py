"""What every policy does alike: a suffix goes before its prefix, and what is in use does not go.

A policy says in which order resting pages come up. One that comes up while a successor is present steps aside, and
comes up first once its last successor is gone; so a policy's own order is kept among the ends of chains, and each page
steps aside at most once for each time that it comes to rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Generic

from kvstore.policy import KeyT, Succession


class PrefixPolicy(ABC, Generic[KeyT]):
    """An ``EvictionPolicy`` of which subclasses give the order."""

    def __init__(self) -> None:
        self._succession: Succession[KeyT] = Succession()
        self._successors = self._succession.successors
        self._first: OrderedDict[KeyT, None] = OrderedDict()  # resting; their turn has come
        self._aside: OrderedDict[KeyT, None] = OrderedDict()  # resting; came up while a successor was present
        self._ordered: set[KeyT] = set()  # resting; in the policy's own order

    @abstractmethod
    def _arrive(self, key: KeyT, parent: KeyT | None) -> None:
        """A page arrived; it is in use."""

    @abstractmethod
    def _hit(self, key: KeyT) -> None:
        """A page is wanted again. It may be resting."""

    @abstractmethod
    def _enter(self, key: KeyT) -> None:
        """A page rests from now on."""

    @abstractmethod
    def _leave(self, key: KeyT) -> None:
        """A page that rested in the policy's own order is in use from now on."""

    @abstractmethod
    def _pass_over(self, key: KeyT) -> None:
        """A page has come up and is not in the policy's own order until it rests again."""

    @abstractmethod
    def _depart(self, key: KeyT) -> None:
        """A page is gone."""

    @abstractmethod
    def _candidate(self) -> KeyT | None:
        """Return the resting page that comes up next."""

    def __len__(self) -> int:
        return len(self._ordered) + len(self._first) + len(self._aside)

    def add(self, key: KeyT, parent: KeyT | None) -> None:
        """See ``EvictionPolicy``."""
        self._succession.add(key, parent)
        self._arrive(key, parent)

    def use(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        self._stir(key)
        self._hit(key)

    def hold(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        self._stir(key)

    def rest(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        self._ordered.add(key)
        self._enter(key)

    def retire(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        if key in self._ordered:
            self._ordered.remove(key)
            self._pass_over(key)
            self._first[key] = None

    def discard(self, key: KeyT) -> None:
        """See ``EvictionPolicy``."""
        self._stir(key)
        self._depart(key)
        end = self._succession.discard(key)
        if end is not None and end in self._aside:
            del self._aside[end]
            self._first[end] = None
            self._first.move_to_end(end, last=False)

    def victim(self) -> KeyT | None:
        """See ``EvictionPolicy``."""
        while self._first:
            key = next(iter(self._first))
            if key not in self._successors:
                return key
            del self._first[key]
            self._aside[key] = None
        while (candidate := self._candidate()) is not None:
            if candidate not in self._successors:
                return candidate
            self._ordered.remove(candidate)
            self._pass_over(candidate)
            self._aside[candidate] = None
        return next(iter(self._aside), None)

    def _stir(self, key: KeyT) -> None:
        """The page rests no more."""
        if key in self._ordered:
            self._ordered.remove(key)
            self._leave(key)
        else:
            self._first.pop(key, None)
            self._aside.pop(key, None)
