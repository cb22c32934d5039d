"""Asking tiers that others write to, too, what they hold: the pool, and a host tier that engines have in common.

It is done beside the scheduler's thread: a slow pool must not hold up a step. A request waits for its answer no longer
than a tier's own deadline, and not at all while none of them is in use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from kvstore.breaker import Breaker
from kvstore.page import PageLayout, Tier, page_key
from kvstore.tiers.base import PageTier

_FRESH_S = 2.0
"""A request that waited longer than this for its turn asks again: pages come and go."""

Places = Mapping[bytes, Tier]
"""Blocks that every rank has in a tier, and the fastest such tier."""


class SharedTier(PageTier, Protocol):
    """A tier that other processes write to, too, and that may be out of reach."""

    @property
    def breaker(self) -> Breaker:
        """Whether it is in use."""


class SharedLookup:
    """Look-ups of blocks that every rank must have in one of the tiers."""

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        open_tiers: Callable[[PageLayout], Sequence[SharedTier]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``open_tiers`` returns one rank's tiers, fastest first, the same ones for each; they are closed here."""
        self._clock = clock
        self._fingerprints = [layout.fingerprint for layout in layouts]
        self._by_kind = list(zip(*map(open_tiers, layouts), strict=True))  # for each kind of tier, that of each rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-lookup")
        self._asked: dict[str, tuple[float, Future[Places]]] = {}
        self._times: deque[tuple[Tier, float]] = deque()
        self.kinds = tuple(tiers[0].tier for tiers in self._by_kind)

    def is_due(self, request_id: str) -> bool:
        """Tell whether a request should ask: it has not, or so long ago that the answer may be another one by now."""
        known = self._asked.get(request_id)
        return known is None or (known[1].done() and self._clock() - known[0] > _FRESH_S)

    def ask(self, request_id: str, names: Sequence[bytes], kinds: Collection[Tier]) -> None:
        """Begin to look these blocks up in tiers of these kinds, as far as they are in use."""
        now_s = self._clock()
        asked = [tiers for tiers in self._by_kind if tiers[0].tier in kinds and all(t.breaker.closed for t in tiers)]
        if names and asked:
            self._asked[request_id] = now_s, self._thread.submit(self._look, tuple(names), asked)
        else:
            nothing: Future[Places] = Future()
            nothing.set_result({})
            self._asked[request_id] = now_s, nothing

    def answer(self, request_id: str) -> Places | None:
        """Return which of them are there; ``None`` while the answer is under way."""
        asked = self._asked.get(request_id)
        if asked is None:
            return {}
        return asked[1].result() if asked[1].done() else None

    def take_times(self) -> list[tuple[Tier, float]]:
        """Return which tiers were asked, and how long each took to answer, once."""
        return [self._times.popleft() for _ in range(len(self._times))]

    def forget(self, request_id: str) -> None:
        """The answer is not wanted any more."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[1].cancel()

    def close(self) -> None:
        """End the thread and close the connections."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for tiers in self._by_kind:
            for tier in tiers:
                tier.close()

    def _look(self, names: tuple[bytes, ...], asked: Sequence[Sequence[SharedTier]]) -> Places:
        found: dict[bytes, Tier] = {}
        for tiers in asked:
            began_s = time.monotonic()
            there = [name for name in names if name not in found]
            for fingerprint, tier in zip(self._fingerprints, tiers, strict=True):
                if not there:
                    break
                answers = tier.exists([page_key(fingerprint, name) for name in there])
                there = [name for name, has in zip(there, answers, strict=True) if has]
            found |= dict.fromkeys(there, tiers[0].tier)
            self._times.append((tiers[0].tier, time.monotonic() - began_s))
        return found
