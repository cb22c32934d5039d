"""What the tiers that keep pages in slots have in common: everything but moving bytes.

``DeviceTier``, ``HostTier`` and ``DiskTier`` say how a slot is read, written and made durable; finding, pinning,
evicting, deduplicating, counting and telling of changes is done here, once, under one short lock that is never held
while bytes move.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import ClassVar, TypeVar

from kvstore.outbox import Outbox
from kvstore.page import Namespace, PageKey, PageLayout, PageMeta, Tier, key_fingerprint
from kvstore.policies.learned_reuse import LearnedReuse
from kvstore.policy import EvictionPolicy
from kvstore.retention import RetentionRules
from kvstore.slots import SlotTable
from kvstore.tiers.base import (
    PIN_S,
    Found,
    NewPage,
    OnChange,
    Page,
    PagesRemoved,
    PagesStored,
    TierChange,
    TierStats,
)

PageT = TypeVar("PageT", Page, NewPage)


class Fault(StrEnum):
    """Why a slot that should hold a page did not deliver it."""

    CHECKSUM = "checksum"
    LENGTH = "length"
    AUTHENTICATION = "authentication"  # under its own key
    UNAVAILABLE = "unavailable"  # the medium failed; the page may still be good

    @property
    def is_corruption(self) -> bool:
        """Whether the page itself is bad and must be forgotten."""
        return self is not Fault.UNAVAILABLE


class SlottedTier(ABC):
    """A ``PageTier`` of equal slots. Subclasses move the bytes."""

    tier: ClassVar[Tier]

    def __init__(
        self,
        layout: PageLayout,
        *,
        slots: int,
        on_change: OnChange | None,
        policy: EvictionPolicy[PageKey] | None = None,
        retention: RetentionRules | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.layout = layout
        self._retention = retention if retention is not None else RetentionRules()
        self._has_quotas = self._retention.has_quotas
        self._clock = clock
        self.on_change = on_change
        self._page_bytes = layout.page_bytes
        self._fingerprint = layout.fingerprint
        self._table = SlotTable(slots, policy if policy is not None else self._default_policy(), self._quota_pages)
        self._stats = TierStats()
        self._outbox: Outbox[TierChange] = Outbox()
        self._writing = threading.Lock()  # one writer at a time; taken before _lock
        self._lock = threading.Lock()  # table, stats and the order of changes; held for bookkeeping only

    @abstractmethod
    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        """Fill each buffer from its pinned slot; return the verified checksums."""

    @abstractmethod
    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        """Fill each pinned private slot; return which are written to the last byte."""

    def _default_policy(self) -> EvictionPolicy[PageKey]:
        return LearnedReuse()

    def _record(self, stored: Sequence[tuple[int, Page]], evicted: Sequence[PageKey]) -> bool:
        """Make the change durable, after the bytes and before anybody can find it. Called by the one writer."""
        return True

    def _available(self) -> bool:
        """Whether the medium answers at all; when not, every read is an immediate miss."""
        return True

    @property
    def page_bytes(self) -> int:
        """The length of every page."""
        return self._page_bytes

    @property
    def capacity_bytes(self) -> int:
        """The most bytes of pages that the tier ever holds."""
        return self._table.slots * self._page_bytes

    @property
    def slots(self) -> int:
        """The most pages that the tier ever holds."""
        return self._table.slots

    @property
    def free_pages(self) -> int:
        """Slots that are nobody's."""
        return self._table.free

    @property
    def evictable_pages(self) -> int:
        """Slots whose pages nobody pins."""
        return self._table.evictable

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``PageTier``. One dictionary look-up a key."""
        if not self._available():
            return [False] * len(keys)
        if self._table.can_expire:
            now_s, table = self._clock(), self._table
            return [table.find(key) is not None and not table.is_expired(key, now_s) for key in keys]
        find = self._table.find
        return [find(key) is not None for key in keys]

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        """See ``PageTier``."""
        check_targets(keys, out, self._page_bytes)
        return self._get(
            keys, lambda places, slots: self._read([(s, out[p]) for p, s in zip(places, slots, strict=True)])
        )

    def _get(
        self, keys: Sequence[PageKey], read: Callable[[Sequence[int], Sequence[int]], list[int | Fault]]
    ) -> list[Found | None]:
        """Do ``get``; ``read`` is given the places in ``keys`` of pages that are here and their slots, pinned."""
        began_ns = time.perf_counter_ns()
        results: list[Found | None] = [None] * len(keys)
        if not self._available():
            with self._lock:
                self._stats.miss("unavailable", len(keys))
            return results
        places, slots, metas = self._pin_present(keys)
        with self._pinned(slots):
            answers = read(places, slots)
        corrupt = []
        with self._lock:
            self._table.release(slots)
            self._stats.get_latency.observe(time.perf_counter_ns() - began_ns)
            for place, slot, meta, answer in zip(places, slots, metas, answers, strict=True):
                if isinstance(answer, Fault):
                    self._stats.miss(answer.value)
                    if answer.is_corruption:
                        self._stats.alarm(answer.value)
                        corrupt.append((keys[place], slot))
                else:
                    self._stats.hits += 1
                    results[place] = Found(answer, meta, self._table.expires_at_s(keys[place]))
        if corrupt:
            self._forget(corrupt)
        return results

    def put(self, pages: Sequence[Page]) -> list[bool]:
        """See ``PageTier``. Keeps the leading pages when not all fit."""
        check_buffers([page.key for page in pages], [page.data for page in pages], self._page_bytes)

        def write(jobs: list[tuple[int, Page]]) -> list[tuple[int, Page]]:
            return [job for job, done in zip(jobs, self._write(jobs), strict=True) if done]

        return self._put(pages, write)

    def _put(
        self, pages: Sequence[PageT], write: Callable[[list[tuple[int, PageT]]], list[tuple[int, Page]]]
    ) -> list[bool]:
        """Do ``put``; ``write`` fills pinned private slots and returns what is written there to the last byte."""
        if not pages:
            return []
        if not self._available():
            with self._lock:
                self._stats.dropped += len(pages)
            return [False] * len(pages)
        began_ns = time.perf_counter_ns()
        with self._writing:
            present, fresh, slots, evicted = self._reserve(pages)
            jobs = list(zip(slots, fresh, strict=False))
            with self._pinned(present + slots):
                written = write(jobs)
                if (written or evicted) and not self._record(written, evicted):
                    written = []
            with self._lock:
                stored = tuple((page.key, page.meta) for slot, page in written if self._publish(slot, page))
                self._stats.puts += len(stored)
                self._stats.dropped += len(fresh) - len(written)
                self._tell(PagesStored(self.tier, stored) if stored else None)
                self._table.release(present + slots)
                self._stats.put_latency.observe(time.perf_counter_ns() - began_ns)
        self._deliver()
        readable = {page.key for _, page in written}
        with self._lock:
            return [page.key in readable or self._table.find(page.key) is not None for page in pages]

    def remove(self, keys: Sequence[PageKey]) -> int:
        """See ``PageTier``."""
        with self._writing:
            with self._lock:
                gone = tuple(key for key in keys if self._table.remove(key))
                self._tell(PagesRemoved(self.tier, gone) if gone else None)
            if gone:
                self._record([], gone)
        self._deliver()
        return len(gone)

    def forget(self, namespace: Namespace) -> int:
        """See ``PageTier``. O(its pages)."""
        with self._lock:
            keys = self._table.keys_of(namespace)
        return self.remove(keys)

    def pin(self, keys: Sequence[PageKey], *, for_s: float = PIN_S) -> list[bool]:
        """See ``PageTier``."""
        with self._lock:
            now_s = self._clock()
            self._table.end_holds(now_s)
            return [self._table.hold(key, now_s + for_s) for key in keys]

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """See ``PageTier``."""
        with self._lock:
            for key in reversed(keys):
                self._table.unhold(key)

    def retire(self, keys: Sequence[PageKey]) -> None:
        """See ``PageTier``. Give a prompt's pages front to back."""
        with self._lock:
            for key in reversed(keys):
                self._table.retire(key)

    def scan(self) -> Iterator[tuple[PageKey, PageMeta]]:
        """See ``PageTier``. A snapshot, oldest first."""
        with self._lock:
            entries = self._table.entries()
        return iter(entries)

    def announce(self, limit: int) -> int:
        """See ``PageTier``."""
        with self._lock:
            pages = tuple(self._table.entries()[:limit])
            self._tell(PagesStored(self.tier, pages) if pages else None)
        self._deliver()
        return len(pages)

    def clear(self) -> None:
        """See ``PageTier``. Pages in use lose their names now and their slots when their users are done."""
        with self._lock:
            keys = [key for key, _ in self._table.entries()]
        self.remove(keys)

    def stats(self) -> TierStats:
        """See ``PageTier``."""
        with self._lock:
            self._stats.used_bytes = self._table.published * self._page_bytes
            self._stats.read_bytes = self._stats.hits * self._page_bytes
            self._stats.written_bytes = self._stats.puts * self._page_bytes
            return self._stats.copy()

    def check(self) -> None:
        """See ``PageTier``."""
        with self._lock:
            self._table.check()

    def close(self) -> None:  # noqa: B027  (memory needs no closing)
        """See ``PageTier``."""

    @contextmanager
    def _pinned(self, slots: Sequence[int]) -> Iterator[None]:
        """Let go of pinned slots if what is done with them raises, as what callers bring may; else that is theirs."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._table.release(slots)
            raise

    def _pin_present(self, keys: Sequence[PageKey]) -> tuple[list[int], list[int], list[PageMeta]]:
        """Pin what is here; return the places in ``keys``, the slots and their metas. Counts the others as misses."""
        places, slots, metas = [], [], []
        expired: list[PageKey] = []
        with self._lock:
            now_s = self._clock() if self._table.can_expire else 0.0
            for place, key in enumerate(keys):
                if now_s and self._table.is_expired(key, now_s):
                    self._stats.miss("expired")
                    expired.append(key)
                    continue
                slot = self._table.acquire([key])
                if slot:
                    places.append(place)
                    slots += slot
                    metas.append(self._table.meta(slot[0]))
                elif key_fingerprint(key) != self._fingerprint:
                    self._stats.miss("fingerprint")
                    self._stats.alarm("fingerprint")
                else:
                    self._stats.miss("absent")
        if expired:
            self.remove(expired)
        return places, slots, metas

    def _reserve(self, pages: Sequence[PageT]) -> tuple[list[int], list[PageT], list[int], list[PageKey]]:
        """Pin what is already here and take slots for the rest.

        Returns the slots of present pages, the new pages, slots for as many of these as fit, and whom that evicted.
        """
        with self._lock:
            self._table.end_holds(self._clock())
            present: list[int] = []
            fresh: dict[PageKey, PageT] = {}
            for page in pages:
                if key_fingerprint(page.key) != self._fingerprint:
                    self._stats.alarm("fingerprint")
                elif slot := self._table.acquire([page.key]):
                    present += slot
                else:
                    fresh.setdefault(page.key, page)
            wanted, made_room = self._within_quotas(list(fresh.values()))
            room = min(len(wanted), self._table.free + self._table.evictable)
            taken = self._table.allocate(room)
            assert taken is not None, "there was room a moment ago, under the same lock"
            slots, evicted = taken
            self._stats.dropped += len(fresh) - len(wanted)
            self._evicted(made_room + evicted)
            return present, wanted, slots, made_room + evicted

    def _within_quotas(self, pages: list[PageT]) -> tuple[list[PageT], list[PageKey]]:
        """Return the leading pages of each namespace that its quota allows, and what it gave up for them."""
        if not self._has_quotas:
            return pages, []
        granted, evicted = {}, []
        for namespace, count in Counter(page.meta.namespace for page in pages).items():
            granted[namespace], gone = self._table.grant(namespace, count)
            evicted += gone
        kept = []
        for page in pages:
            if granted[page.meta.namespace]:
                granted[page.meta.namespace] -= 1
                kept.append(page)
        return kept, evicted

    def _quota_pages(self, namespace: Namespace) -> int | None:
        quota = self._retention.rule(namespace).quota_bytes
        return None if quota is None else quota // self._page_bytes

    def _expiry(self, page: Page) -> int:
        """Return when a page ends: as it says itself, else as the rule of its namespace does; 0 for never."""
        if page.expires_at_s:
            return page.expires_at_s
        ttl_s = self._retention.rule(page.meta.namespace).ttl_s
        return 0 if ttl_s is None else max(1, int(self._clock() + ttl_s))

    def _publish(self, slot: int, page: Page) -> bool:
        return self._table.publish(slot, page.key, page.meta, self._expiry(page))

    def _evicted(self, keys: Sequence[PageKey]) -> None:
        """Count and tell; the caller holds the lock."""
        if keys:
            self._stats.evictions += len(keys)
            self._tell(PagesRemoved(self.tier, tuple(keys)))

    def _forget(self, corrupt: Sequence[tuple[PageKey, int]]) -> None:
        """Remove pages that did not verify, unless their name has moved to another slot meanwhile."""
        with self._lock:
            keys = [key for key, slot in corrupt if self._table.find(key) == slot]
        self.remove(keys)

    def _tell(self, change: TierChange | None) -> None:
        """Queue a change in order; the caller holds the lock."""
        if change is not None and self.on_change is not None:
            self._outbox.append(change)

    def _deliver(self) -> None:
        if self.on_change is not None:
            self._outbox.drain(self.on_change)


def check_buffers(keys: Sequence[PageKey], buffers: Sequence[memoryview], page_bytes: int) -> None:
    """Raise ``ValueError`` unless there is one buffer of one page for each key."""
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
    for buffer in buffers:
        if buffer.nbytes != page_bytes:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes for pages of {page_bytes}")


def check_targets(keys: Sequence[PageKey], out: Sequence[memoryview], page_bytes: int) -> None:
    """Raise ``ValueError`` unless there is one buffer for each key that a page can be read into."""
    check_buffers(keys, out, page_bytes)
    if any(buffer.readonly for buffer in out):
        raise ValueError("no page can be read into a buffer that is read-only")
