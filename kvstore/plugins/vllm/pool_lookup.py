"""Asking the pool what it holds, beside the scheduler's thread: a slow pool must not hold up a step.

A request waits for its answer no longer than the pool's own deadline, and not at all while the pool is out of use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.page import PageLayout, page_key
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_topology import PoolOptions

_NONE: frozenset[bytes] = frozenset()
_FRESH_S = 2.0
"""A request that waited longer than this for its turn asks again: pages come and go."""


class PoolLookup:
    """Look-ups of blocks that every rank must have in the pool."""

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        url: str,
        options: PoolOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Needs no server yet. Raises ``MediumError`` for a URL that is none."""
        self._clock = clock
        self._tiers = [
            (layout.fingerprint, PoolTier(layout, url, capacity_bytes=layout.page_bytes, options=options))
            for layout in layouts
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-pool-lookup")
        self._asked: dict[str, tuple[float, Future[frozenset[bytes]]]] = {}

    def ask(self, request_id: str, names: Sequence[bytes]) -> None:
        """Begin to look these blocks up, unless that is under way or was done a moment ago."""
        now_s, known = self._clock(), self._asked.get(request_id)
        if known is not None and not (known[1].done() and now_s - known[0] > _FRESH_S):
            return
        if names and all(tier.breaker.closed for _, tier in self._tiers):
            self._asked[request_id] = now_s, self._thread.submit(self._look, tuple(names))
        else:
            nothing: Future[frozenset[bytes]] = Future()
            nothing.set_result(_NONE)
            self._asked[request_id] = now_s, nothing

    def answer(self, request_id: str) -> frozenset[bytes] | None:
        """Return which of them are there; ``None`` while the answer is under way."""
        asked = self._asked.get(request_id)
        if asked is None:
            return _NONE
        return asked[1].result() if asked[1].done() else None

    def forget(self, request_id: str) -> None:
        """The answer is not wanted any more."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[1].cancel()

    def close(self) -> None:
        """End the thread and close the connections."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for _, tier in self._tiers:
            tier.close()

    def _look(self, names: tuple[bytes, ...]) -> frozenset[bytes]:
        there = list(names)
        for fingerprint, tier in self._tiers:
            if not there:
                break
            answers = tier.exists([page_key(fingerprint, name) for name in there])
            there = [name for name, has in zip(there, answers, strict=True) if has]
        return frozenset(there)
