"""S3-FIFO: a small queue that one-hit wonders fall through, a main queue, and a memory of what fell.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Queues keep the order of arrival; a
hit only counts. What is wanted twice while it is in the small queue, or again after it fell through, is in the main
queue, and goes round there once for each of its last hits, three at most.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.policies.lineage import PrefixPolicy
from kvstore.policy import KeyT

_SMALL_SHARE = 0.1
_MOST_HITS = 3


class S3Fifo(PrefixPolicy[KeyT]):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[KeyT, None] = OrderedDict()
        self._main: OrderedDict[KeyT, None] = OrderedDict()
        self._hits: dict[KeyT, int] = {}
        self._fell: OrderedDict[KeyT, None] = OrderedDict()  # names only

    def _arrive(self, key: KeyT, parent: KeyT | None) -> None:
        self._hits[key] = 0
        if key in self._fell:
            del self._fell[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def _hit(self, key: KeyT) -> None:
        self._hits[key] = min(self._hits[key] + 1, _MOST_HITS)

    def _enter(self, key: KeyT) -> None:
        if key not in self._small:
            self._main[key] = None  # at its place, or behind all if it had come up

    def _leave(self, key: KeyT) -> None:
        pass

    def _pass_over(self, key: KeyT) -> None:
        self._small.pop(key, None)
        self._main.pop(key, None)

    def _depart(self, key: KeyT) -> None:
        if key in self._small:
            self._fell[key] = None
            while len(self._fell) > len(self._hits):
                self._fell.popitem(last=False)
        del self._hits[key]
        self._pass_over(key)

    def _candidate(self) -> KeyT | None:
        if not self._ordered:
            return None
        rounds = (_MOST_HITS + 1) * len(self._main) + len(self._small)  # then all in the main queue is in use
        for _ in range(rounds):
            if self._small and (len(self._small) > _SMALL_SHARE * len(self._hits) or not self._main):
                key = next(iter(self._small))
                if key in self._ordered and self._hits[key] < 2:
                    return key
                del self._small[key]
                self._main[key] = None
                continue
            key = next(iter(self._main))
            if key in self._ordered and not self._hits[key]:
                return key
            self._main.move_to_end(key)
            self._hits[key] = max(0, self._hits[key] - 1)
        return next(key for key in (*self._small, *self._main) if key in self._ordered)
