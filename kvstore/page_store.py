"""The tiers below an engine's own memory, on the caller's buffers: what a plug-in for any engine is built on.

``get`` and ``exists`` answer within a deadline and never raise for a fault of a medium. ``put`` copies into the host
tier and returns; disk and pool are written behind, straight from there. What exceeds the bytes that may wait is not
written further down, and counted. Without a host tier a put is a synchronous write, since a caller's buffer is its own
again when the call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from kvstore.behind import Behind, BehindOptions, Complete
from kvstore.deadline import Allowance
from kvstore.fetching import BufferTarget, Fetcher, Nowhere, OnRead, Target
from kvstore.in_flight import InFlight
from kvstore.memory import ByteRows
from kvstore.page import Namespace, PageKey, Tier
from kvstore.tiers.base import PIN_S, NewPage, Page, PageTier, TierStats
from kvstore.tiers.host import FillRows, InPlaceTier, LendingTier
from kvstore.tiers.slotted import check_targets

AnswerT = TypeVar("AnswerT")


class WritePolicy(StrEnum):
    """Which pages go below the host tier."""

    THROUGH = "through"  # every page, at once
    SELECTIVE = "selective"  # pages that were wanted again: found in the host tier, or put a second time
    BACK = "back"  # pages that others have pushed out of ``back_bytes``, unless their run had ended by then


@dataclass(frozen=True, slots=True)
class PageStoreOptions:
    """Limits of one store."""

    get_s: Allowance = field(default_factory=Allowance)
    write_policy: WritePolicy = WritePolicy.THROUGH
    fetch_threads: int = 2
    window_bytes: int = 8 << 20  # moved at once: the staging memory of each thread
    behind_bytes: int = 256 << 20  # accepted by put and not yet on disk and pool
    back_bytes: int = 256 << 20  # in the host tier alone, under BACK; at most half of it. A crash takes these
    promotes: bool = True  # pages that were read from below into the host tier


class PageStore:
    """Host, disk and pool of one layout, any of them, fastest first. Thread-safe."""

    def __init__(
        self,
        tiers: Sequence[PageTier],
        options: PageStoreOptions | None = None,
        *,
        on_read: OnRead | None = None,
        complete: Complete | None = None,
    ) -> None:
        """The store closes the tiers. ``on_read`` is told of every read of disk and pool, from any thread; ``complete``
        is asked by the thread that writes behind.

        Raises ``ValueError`` for tiers in disorder or of different page sizes.
        """
        if [tier.tier for tier in tiers] != sorted({tier.tier for tier in tiers}):
            raise ValueError("tiers go from fast to slow, one of each")
        if len({tier.page_bytes for tier in tiers}) > 1:
            raise ValueError("tiers of different page sizes")
        self.options = options if options is not None else PageStoreOptions()
        self.tiers = tuple(tiers)
        self._page_bytes = tiers[0].page_bytes if tiers else 0
        self._host = next((tier for tier in tiers if tier.tier is Tier.HOST and isinstance(tier, LendingTier)), None)
        self._in_place = self._host if isinstance(self._host, InPlaceTier) else None
        self._below = tuple(tier for tier in tiers if tier is not self._host)
        self.in_flight = InFlight()
        self._fetcher = Fetcher(
            tiers,
            self.in_flight,
            threads=self.options.fetch_threads,
            window_bytes=self.options.window_bytes,
            promotes=self.options.promotes,
            on_read=on_read,
        )
        self._behind = None if self._host is None else self._open_behind(self._host, complete)
        self._lock = threading.Lock()
        self._closed = False

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """Tell for each key whether some tier would probably deliver it. Slower tiers are asked only for the rest."""
        return [tier is not None for tier in self.locate(keys)]

    def locate(self, keys: Sequence[PageKey], *, among: Collection[Tier] | None = None) -> list[Tier | None]:
        """Return the fastest tier that would probably deliver each page, of all or of these tiers."""
        places: list[Tier | None] = [None] * len(keys)
        for tier in self.tiers:
            if among is not None and tier.tier not in among:
                continue
            asked = [place for place, known in enumerate(places) if known is None]
            if not asked:
                break
            for place, has in zip(asked, tier.exists([keys[place] for place in asked]), strict=True):
                if has:
                    places[place] = tier.tier
        return places

    def match(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading pages are there."""
        there = self.exists(keys)
        return there.index(False) if False in there else len(there)

    def get(
        self, keys: Sequence[PageKey], out: Sequence[memoryview], *, timeout_s: float | None = None
    ) -> list[Tier | None]:
        """Fill ``out[i]`` with the page of ``keys[i]``; name the tier that each came from, ``None`` for a miss.

        Ends within ``timeout_s`` (by default what the options allow for so many bytes). A buffer that was not filled
        has unspecified content, and none is written after the call.
        """
        check_targets(keys, out, self._page_bytes)
        allowed_s = self.options.get_s.seconds(len(keys) * self._page_bytes) if timeout_s is None else timeout_s
        found = self.start_get(keys, BufferTarget(out), timeout_s=allowed_s).result()
        if self.options.write_policy is WritePolicy.SELECTIVE:
            again = [key for key, tier in zip(keys, found, strict=True) if tier is Tier.HOST]
            if again and self._behind is not None:
                self._behind.write(again)
        return found

    def start_get(
        self,
        keys: Sequence[PageKey],
        target: Target,
        *,
        timeout_s: float,
        to_first_gap: bool = False,
    ) -> Future[list[Tier | None]]:
        """Do what ``get`` does, in the background and to any kind of memory; see ``Fetcher.start``."""
        deadline_s = time.monotonic() + timeout_s
        return self._fetcher.start(keys, target, deadline_s=deadline_s, to_first_gap=to_first_gap)

    def promote(self, keys: Sequence[PageKey], *, timeout_s: float = 60.0) -> Future[list[Tier | None]]:
        """Bring pages that lie below up to the host tier, in the background: ahead of a tool's return, say.

        The result names the tier that each was brought from, ``None`` for what was there or is nowhere.
        """
        places = [i for i, here in enumerate(self._host.exists(keys)) if not here] if self._host is not None else []
        found: Future[list[Tier | None]] = Future()

        def tell(fetched: Future[list[Tier | None]]) -> None:
            tiers: list[Tier | None] = [None] * len(keys)
            for place, tier in zip(places, fetched.result(), strict=True):
                tiers[place] = tier
            found.set_result(tiers)

        self.start_get([keys[i] for i in places], Nowhere(), timeout_s=timeout_s).add_done_callback(tell)
        return found

    def stop_fetching(self) -> None:
        """Answer every get that waits with what it has, and those to come with nothing. Idempotent."""
        self._fetcher.close()

    def put(self, pages: Sequence[Page]) -> list[bool]:
        """Store pages; ``True`` for each that ``get`` finds from now on. Never waits for disk or pool behind a host.

        ``False`` is for what finds the host tier full of pages in use, or waiting to be written.
        """
        if self._closed:
            return [False] * len(pages)
        host = self._host
        if host is None or self._behind is None:
            return self.write(pages)
        return self._put_and_write_behind(host, self._behind, [page.key for page in pages], lambda: host.put(pages))

    def put_in_place(self, pages: Sequence[NewPage], fill: FillRows) -> list[bool]:
        """Do ``put``, with pages written by ``fill`` straight to where the host tier keeps them; see ``InPlaceTier``.

        Only where ``is_in_place``; else nothing is stored.
        """
        host = self._in_place
        if self._closed or host is None or self._behind is None:
            return [False] * len(pages)
        keys = [page.key for page in pages]
        return self._put_and_write_behind(host, self._behind, keys, lambda: host.put_in_place(pages, fill))

    def wait_for_room(self, pages: int, timeout_s: float) -> bool:
        """Wait until so many pages more may be put with none of them dropped; ``False`` if that takes longer."""
        return self._behind is None or self._behind.wait_for_room(pages, timeout_s)

    def write(self, pages: Sequence[Page]) -> list[bool]:
        """Store pages in every tier before returning; ``True`` for each that some tier has."""
        mine, _ = self.in_flight.claim([page.key for page in pages])
        try:
            answers = [tier.put(pages) for tier in self.tiers]
        finally:
            self.in_flight.release(mine)
        return [any(each) for each in zip(*answers, strict=True)] if answers else [False] * len(pages)

    def remove(self, keys: Sequence[PageKey]) -> int:
        """Forget pages in every tier; return how many some tier had, each counted once."""
        there = self.exists(list(dict.fromkeys(keys)))
        self._in_every_tier(lambda tier: tier.remove(keys))
        return sum(there)

    def clear(self, *, storage: bool = True) -> None:
        """Forget every page of this layout in every tier, in the pool for every client of the server.

        Without ``storage`` in the host tier alone; what was on its way from there to disk and pool goes too.
        """
        self._in_every_tier(lambda tier: tier.clear() if storage or tier.tier is Tier.HOST else None)

    def forget(self, namespace: Namespace) -> int:
        """Forget a namespace in every tier; return how many pages of all tiers that were.

        Pages on their way from or to disk and pool are forgotten, too. A pool that is away does it when it is back.
        """
        return sum(self._in_every_tier(lambda tier: tier.forget(namespace)))

    def pin(self, keys: Sequence[PageKey], *, for_s: float = PIN_S) -> list[bool]:
        """Protect pages from eviction in every tier that has them, counted; ``False`` where none has.

        Each pin ends with its ``unpin``, or after ``for_s`` if its owner is gone by then.
        """
        answers = [tier.pin(keys, for_s=for_s) for tier in self.tiers]
        return [any(each) for each in zip(*answers, strict=True)] if answers else [False] * len(keys)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Release one pin of each page in every tier."""
        for tier in self.tiers:
            tier.unpin(keys)

    def retire(self, keys: Sequence[PageKey]) -> None:
        """The run that these pages belong to has ended: in every tier they go before all others.

        Under ``WritePolicy.BACK`` those that were not written yet are not written any more.
        """
        if self._behind is not None:
            self._behind.let_go(keys)
        for tier in self.tiers:
            tier.retire(keys)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far is on disk and in the pool; ``False`` if it takes longer."""
        return self._behind is None or self._behind.flush(timeout_s)

    @property
    def has_host(self) -> bool:
        """Whether a put stays in memory."""
        return self._host is not None

    @property
    def is_in_place(self) -> bool:
        """Whether the host tier's pages may be written and read where they lie."""
        return self._in_place is not None

    @property
    def memory(self) -> list[ByteRows]:
        """Memory of the store's own that pages are copied from and to: the host tier's, and that of reads."""
        return [*self._fetcher.memory, *([] if self._in_place is None else [self._in_place.memory])]

    @property
    def dropped(self) -> int:
        """Pages that were not written behind because too many waited."""
        return 0 if self._behind is None else self._behind.dropped

    @property
    def spared(self) -> int:
        """Pages that were never written below because their run ended, or they were removed, before it came to that."""
        return 0 if self._behind is None else self._behind.spared

    def stats(self) -> dict[Tier, TierStats]:
        """Return each tier's counters; pages that were not written behind are ``dropped`` of the first tier below."""
        counters = {tier.tier: tier.stats() for tier in self.tiers}
        if self._below:
            counters[self._below[0].tier].dropped += self.dropped
        return counters

    def check(self) -> None:
        """Verify every tier's invariants; raises ``AssertionError``."""
        for tier in self.tiers:
            tier.check()

    def close(self) -> None:
        """Finish what was accepted, answer what waits with what it has, close every tier. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.stop_fetching()
        if self._behind is not None:
            self._behind.close()
        for tier in self.tiers:
            tier.close()

    def _put_and_write_behind(
        self, host: LendingTier, behind: Behind, keys: list[PageKey], put: Callable[[], list[bool]]
    ) -> list[bool]:
        policy = self.options.write_policy
        wanted = host.exists(keys) if policy is WritePolicy.SELECTIVE else [True] * len(keys)
        stored = put()
        keys = [key for key, a, b in zip(keys, stored, wanted, strict=True) if a and b]
        if policy is WritePolicy.BACK:
            behind.keep(keys)
        else:
            behind.write(keys)
        return stored

    def _open_behind(self, host: LendingTier, complete: Complete | None) -> Behind:
        limits = BehindOptions(
            window_pages=max(1, self.options.window_bytes // self._page_bytes),
            behind_pages=self.options.behind_bytes // self._page_bytes,
            back_pages=min(self.options.back_bytes // self._page_bytes, host.capacity_bytes // self._page_bytes // 2),
        )
        return Behind(host, self._below, limits, complete)

    def _in_every_tier(self, drop: Callable[[PageTier], AnswerT]) -> list[AnswerT]:
        """Drop pages from every tier so that none on its way between two of them survives.

        The host tier goes first, which stops those that wait to be written; what is read from below meanwhile is not
        promoted, and what was promoted before that was known goes with the host tier's second turn.
        """
        answers = [drop(tier) for tier in self.tiers]
        if self._host is not None and self._behind is not None:
            self._fetcher.forget_promotions()
            answers.append(drop(self._host))
            self._behind.let_go_of_removed()
        return answers
