"""Asking tiers that others write to, too, what they hold: the pool, and a host tier that engines have in common.

It is done beside the scheduler's thread: a slow pool must not hold up a step. A request waits for its answer no longer
than a tier's own deadline, and not at all while none of them is in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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

    def ask(self, request_id: str, names: Sequence[bytes]) -> None:
        """Begin to look these blocks up, unless that is under way or was done a moment ago."""
        now_s, known = self._clock(), self._asked.get(request_id)
        if known is not None and not (known[1].done() and now_s - known[0] > _FRESH_S):
            return
        if names and any(map(_is_in_use, self._by_kind)):
            self._asked[request_id] = now_s, self._thread.submit(self._look, tuple(names))
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

    def _look(self, names: tuple[bytes, ...]) -> Places:
        found: dict[bytes, Tier] = {}
        for tiers in self._by_kind:
            there = [name for name in names if name not in found]
            for fingerprint, tier in zip(self._fingerprints, tiers, strict=True):
                if not there:
                    break
                answers = tier.exists([page_key(fingerprint, name) for name in there])
                there = [name for name, has in zip(there, answers, strict=True) if has]
            found |= dict.fromkeys(there, tiers[0].tier)
        return found


def _is_in_use(tiers: Sequence[SharedTier]) -> bool:
    return all(tier.breaker.closed for tier in tiers)
