"""LFU with aging: the least wanted goes first, and what was wanted long ago counts less and less.

Source: Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000 (LFU with dynamic aging):
a page's rank is the rank of the last victim when it was last wanted, plus how often it was wanted.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvstore.policies.lineage import PrefixPolicy
from kvstore.policy import KeyT


class AgingLfu(PrefixPolicy[KeyT]):
    """See the module. O(log pages) amortised."""

    def __init__(self) -> None:
        super().__init__()
        self._hits: dict[KeyT, int] = {}
        self._rank: dict[KeyT, tuple[int, int]] = {}  # of pages in order: age plus hits, then when they came to rest
        self._heap: list[tuple[tuple[int, int], KeyT]] = []  # also of pages that rest no more
        self._age = 0
        self._moment = 0

    def _arrive(self, key: KeyT, parent: KeyT | None) -> None:
        self._hits[key] = 0

    def _hit(self, key: KeyT) -> None:
        self._hits[key] += 1

    def _enter(self, key: KeyT) -> None:
        self._moment += 1
        rank = self._rank[key] = (self._age + self._hits[key], self._moment)
        heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 2 * len(self._rank):
            self._heap = [(rank, key) for key, rank in self._rank.items()]
            heapify(self._heap)

    def _leave(self, key: KeyT) -> None:
        self._pass_over(key)

    def _pass_over(self, key: KeyT) -> None:
        self._rank.pop(key, None)

    def _depart(self, key: KeyT) -> None:
        self._rank.pop(key, None)
        del self._hits[key]

    def _candidate(self) -> KeyT | None:
        while self._heap:
            rank, key = self._heap[0]
            if self._rank.get(key) == rank:
                self._age = rank[0]
                return key
            heappop(self._heap)
        return None
