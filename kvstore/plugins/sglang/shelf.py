"""The pages of one host pool in our tiers: what SGLang's calls come down to.

Nothing here raises for a fault of a medium, and every call has a deadline: SGLang has one thread each for looking up,
reading and writing, and a call that hangs stops all requests' prefetching.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from msgspec import structs

from kvstore.deadline import Allowance
from kvstore.fetching import Target, report
from kvstore.memory import page_rows
from kvstore.page import PageKey, PageLayout, PageMeta, Tier, key_content_hash
from kvstore.page_store import PageStore, PageStoreOptions
from kvstore.plugins.sglang.blocks import BlockBook
from kvstore.plugins.sglang.identity import keys_of
from kvstore.plugins.sglang.memory import Pieces, gather
from kvstore.tiers.base import Page, PageTier, TierStats
from kvstore.worth import FetchWorth, WorthOptions

_WINDOW_BYTES = 8 << 20
_PROBE_BYTES = 1 << 20
_TOKENS_WAIT_S = 1.0
"""How long pages wait in the buffer for the event that tells their tokens. SGLang publishes it before the write as a
rule, but of what a request ends with only when the write has returned and the scheduler is idle."""

_LOCAL = frozenset({Tier.HOST, Tier.DISK})
_NAMELESS = PageMeta(None, b"")


@dataclass(frozen=True, slots=True)
class ShelfOptions:
    """Limits and rates. ``is_waiting_for_tokens``: whether the engine's events tell what pages are."""

    get_s: Allowance = field(default_factory=Allowance)
    put_s: Allowance = field(default_factory=lambda: Allowance(fixed_s=2.0))  # for room in the buffer
    worth: WorthOptions = field(default_factory=WorthOptions)
    is_waiting_for_tokens: bool = False
    writes: bool = True
    promotes: bool = False
    behind_bytes: int = 256 << 20


class Shelf:
    """Pages of one layout, by SGLang's keys. Thread-safe. It closes its tiers."""

    def __init__(
        self,
        layout: PageLayout,
        tiers: Sequence[PageTier],
        book: BlockBook,
        options: ShelfOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.page_bytes = layout.page_bytes
        self.page_tokens = layout.page_tokens
        self.options = options
        self.worth = FetchWorth(options.worth)
        self._book = book
        self._clock = clock
        self._guard = threading.Lock()  # of worth
        self._fingerprint = layout.fingerprint
        self._tiers = {tier.tier: tier for tier in tiers}
        store_options = PageStoreOptions(
            get_s=options.get_s,
            window_bytes=_WINDOW_BYTES,
            promotes=options.promotes,
            behind_bytes=options.behind_bytes,
        )
        self.store = PageStore(tiers, store_options, on_read=self._observe_read, complete=self._name)
        self._window = max(1, _WINDOW_BYTES // self.page_bytes)
        if self.store.has_host:
            self._window = max(1, min(self._window, options.behind_bytes // self.page_bytes // 2))
        self._staging = page_rows(self._window, self.page_bytes)
        self._writing = threading.Lock()  # one writer at a time: there is one staging
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-probe")
        self._probing = threading.Lock()
        self._closed = False

    def claim(self, keys: Sequence[str]) -> int:
        """Return how many leading pages are there and sooner fetched than computed."""
        if self._closed or not keys:
            return 0
        places = self._locate(keys_of(self._fingerprint, keys))
        with self._guard:
            worth = self.worth.leading(places, page_bytes=self.page_bytes, page_tokens=self.page_tokens)
            due = self.worth.due(self._clock())
        if due:
            self._probe_later(due, keys)
        return worth

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Tell for each page whether it is there, whatever it costs to fetch."""
        return [False] * len(keys) if self._closed else self.store.exists(keys_of(self._fingerprint, keys))

    def get(self, keys: Sequence[str], target: Target) -> list[bool]:
        """Fill the target with the pages that are there, up to the first window with a miss in it."""
        if self._closed or not keys:
            return [False] * len(keys)
        timeout_s = self.options.get_s.seconds(len(keys) * self.page_bytes)
        with self._guard:
            patience_s = self.worth.patience_s(len(keys), self.page_tokens)
        if patience_s is not None:
            timeout_s = min(timeout_s, patience_s)
        fetched = self.store.start_get(keys_of(self._fingerprint, keys), target, timeout_s=timeout_s, to_first_gap=True)
        return [tier is not None for tier in fetched.result()]

    def put(self, keys: Sequence[str], pages: Sequence[Pieces]) -> list[bool]:
        """Store pages from the engine's memory; ``True`` for each that is stored. The memory is its own again then."""
        stored = [False] * len(keys)
        if self._closed or not self.options.writes:
            return stored
        names = keys_of(self._fingerprint, keys)
        for tier in (self._tiers[at] for at in _LOCAL if at in self._tiers):
            stored = [known or has for known, has in zip(stored, tier.exists(names), strict=True)]
        lacking = [place for place, has in enumerate(stored) if not has]
        with self._writing:
            for start in range(0, len(lacking), self._window):
                places = lacking[start : start + self._window]
                written = self._write([names[place] for place in places], [pages[place] for place in places])
                for place, done in zip(places, written, strict=True):
                    stored[place] = done
        return stored

    def clear(self) -> None:
        """Forget everything of this layout."""
        if not self._closed:
            self.store.clear()

    def announce(self, limit: int) -> None:
        """Tell of what disk and pool hold already, in the background: a pool's headers must be read."""
        for tier in (Tier.DISK, Tier.POOL):
            if tier in self._tiers:
                self._prober.submit(self._announce, self._tiers[tier], limit).add_done_callback(report)

    def computed(self, tokens: int, took_s: float) -> None:
        """The engine computed so many tokens in this time."""
        with self._guard:
            self.worth.prefill.observe(tokens, took_s)

    def stats(self) -> dict[Tier, TierStats]:
        """Return each tier's counters."""
        return self.store.stats()

    def close(self) -> None:
        """Answer what waits, let the tiers go. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.store.stop_fetching()
        self._prober.shutdown(wait=True, cancel_futures=True)
        with self._writing:
            self.store.close()

    def _locate(self, names: list[PageKey]) -> list[Tier]:
        """Return where each leading page lies. The pool is asked only for what it would pay to fetch."""
        local = self.store.locate(names, among=_LOCAL)
        if Tier.POOL not in self._tiers or None not in local:
            return _leading(local)
        missing = [place for place, tier in enumerate(local) if tier is None]
        hoped = [tier if tier is not None else Tier.POOL for tier in local]
        with self._guard:
            hope = self.worth.leading(
                hoped, page_bytes=self.page_bytes, page_tokens=self.page_tokens, unasked=Tier.POOL
            )
        if hope <= missing[0]:
            return _leading(local)
        began_s = time.monotonic()
        pooled = self.store.locate([names[place] for place in missing], among={Tier.POOL})
        with self._guard:
            self.worth.asked(Tier.POOL, time.monotonic() - began_s)
        for place, tier in zip(missing, pooled, strict=True):
            local[place] = tier
        return _leading(local)

    def _write(self, names: Sequence[PageKey], pages: Sequence[Pieces]) -> list[bool]:
        ready = []
        for name, pieces, row in zip(names, pages, self._staging, strict=False):
            total = gather(pieces, row)
            ready.append(Page(name, _NAMELESS, memoryview(row), total))
        if not self.store.has_host:
            return self.store.put(self._name(ready, 0.0))
        if not self.store.wait_for_room(len(ready), self.options.put_s.seconds(len(ready) * self.page_bytes)):
            return [False] * len(ready)
        return self.store.put(ready)

    def _name(self, pages: list[Page], put_s: float) -> list[Page]:
        """Give pages their tokens, as far as the engine's events have told them or do so in time.

        What had no name in the buffer had nobody's life there: how long it lives, disk and pool say by its salt.
        """
        wait_s = put_s + _TOKENS_WAIT_S - time.monotonic() if self.options.is_waiting_for_tokens else 0.0
        metas = self._book.lookup([key_content_hash(page.key) for page in pages], wait_s)
        return [
            page if page.meta != _NAMELESS else structs.replace(page, meta=meta or _NAMELESS, expires_at_s=0)
            for page, meta in zip(pages, metas, strict=True)
        ]

    def _observe_read(self, tier: Tier, moved_bytes: int, took_s: float) -> None:
        with self._guard:
            self.worth.fetched(tier, moved_bytes, took_s, self._clock())

    def _probe_later(self, tiers: Sequence[Tier], keys: Sequence[str]) -> None:
        """Read a little of tiers that were found too slow, with no request waiting: they may be faster by now."""
        if self._closed or not self._probing.acquire(blocking=False):
            return
        wanted = list(keys[: max(1, _PROBE_BYTES // self.page_bytes)])
        try:
            self._prober.submit(self._probe, list(tiers), wanted).add_done_callback(report)
        except RuntimeError:  # closed in between
            self._probing.release()

    def _probe(self, tiers: Sequence[Tier], keys: Sequence[str]) -> None:
        try:
            names = keys_of(self._fingerprint, keys)
            scratch = [memoryview(row) for row in page_rows(len(names), self.page_bytes)]
            for at in tiers:
                if (tier := self._tiers.get(at)) is None:
                    continue
                began_s = time.monotonic()
                found = tier.get(names, scratch)
                moved = sum(one is not None for one in found) * self.page_bytes
                self._observe_read(at, moved, time.monotonic() - began_s)
        finally:
            self._probing.release()

    def _announce(self, tier: PageTier, limit: int) -> None:
        tier.announce(limit)


def _leading(places: Sequence[Tier | None]) -> list[Tier]:
    """Return the tiers of the pages up to the first that is nowhere."""
    leading = []
    for tier in places:
        if tier is None:
            break
        leading.append(tier)
    return leading
