"""Which prefixes would be at hand under a rule of keeping: recorded prompts through the production index.

A prompt's marks (``tracing.record.PrefixMarks``) are the blocks of the index, a *place* is one of its instances. What a
request computed is there from its first token on, and for ``retention_ns`` after its last use; a longer prefix is never
used later than what stands in front of it, so what is forgotten is always a prompt's end.

A hit ends at a mark, which understates it by half a stride on average.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstore.page import Tier
from radix_index.index import RadixIndex
from tracing.record import RequestRecord

INDEX_BYTES = 256 << 20
"""Room for some millions of marks; beyond it the oldest are forgotten, as a gateway's index would."""


class KeptPrefixes:
    """See the module. Requests must come in the order of arrival. Cost: O(marks) a request."""

    def __init__(self, stride_tokens: int, retention_ns: int | None = None, index_bytes: int = INDEX_BYTES) -> None:
        self._stride, self._retention_ns = stride_tokens, retention_ns
        self._index = RadixIndex(byte_budget=index_bytes)
        self._used_ns: dict[tuple[str, int], int] = {}
        self._due: list[tuple[int, str, int]] = []  # when a mark is forgotten unless it is used again
        self._coming: list[tuple[int, int, str, Sequence[int]]] = []  # when a computed prompt is at hand
        self._requests = 0

    def hit_tokens(self, record: RequestRecord, place: str) -> int:
        """Return the tokens of its prompt that are at hand at ``place`` as it comes, and let it compute the rest."""
        assert record.prefix is not None
        now_ns, marks = record.stamps.arrived_ns, record.prefix.marks()
        self._advance(now_ns)
        if place not in self._index.instances():
            self._index.add_instance(place, block_size=self._stride)
        known = self._index.match(marks, [place])[place].blocks
        self._use(place, marks[:known], now_ns)
        if record.stamps.first_token_ns is not None:
            self._requests += 1
            heapq.heappush(self._coming, (record.stamps.first_token_ns, self._requests, place, marks))
        return known * self._stride

    def _advance(self, now_ns: int) -> None:
        while self._coming and self._coming[0][0] <= now_ns:
            at_ns, _, place, marks = heapq.heappop(self._coming)
            self._forget(at_ns)
            self._index.stored(place, Tier.DEVICE, marks)
            self._use(place, marks, at_ns)
        self._forget(now_ns)

    def _use(self, place: str, marks: Sequence[int], now_ns: int) -> None:
        if self._retention_ns is None:
            return
        for mark in marks:
            self._used_ns[place, mark] = now_ns
            heapq.heappush(self._due, (now_ns + self._retention_ns, place, mark))

    def _forget(self, now_ns: int) -> None:
        assert self._retention_ns is not None or not self._due
        while self._due and self._due[0][0] < now_ns:
            _, place, mark = heapq.heappop(self._due)
            used_ns = self._used_ns.get((place, mark))
            if used_ns is not None and used_ns + (self._retention_ns or 0) < now_ns:
                del self._used_ns[place, mark]
                self._index.removed(place, Tier.DEVICE, [mark])
