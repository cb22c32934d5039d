"""A host tier that the engine processes of one machine share: the accounts are a daemon's, the bytes cross no socket.

The daemon (``kvstore.shared_host``, ``keepwarm store serve-host``) says which slot of a common memory a page has; bytes
are moved here, and every page that is read is hashed as it is copied, since other processes write to that memory. A
daemon that is away, late or gone is an immediate miss until a probe in the background finds it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvstore.breaker import Breaker
from kvstore.memory import copy_and_hash
from kvstore.outbox import Outbox
from kvstore.page import Namespace, PageKey, PageLayout, PageMeta, Tier, key_fingerprint
from kvstore.retention import RetentionRules
from kvstore.tiers.base import PIN_S, Found, OnChange, Page, PagesRemoved, PagesStored, TierChange, TierStats
from kvstore.tiers.host import Loan
from kvstore.tiers.shared_client import Connected, SharedClient, SharedHostOptions
from kvstore.tiers.shared_wire import (
    WIRE_VERSION,
    Acquire,
    Check,
    Clear,
    Entry,
    Exists,
    Forget,
    Hello,
    Pin,
    Publish,
    Release,
    Remove,
    Reply,
    Request,
    Reserve,
    Retire,
    Scan,
    Unpin,
)
from kvstore.tiers.slotted import check_buffers, check_targets

_ANNOUNCE_S = 10.0


class SharedHostTier:
    """One engine's part in a shared host tier. Satisfies ``LendingTier``."""

    tier = Tier.HOST

    def __init__(
        self,
        layout: PageLayout,
        path: Path,
        *,
        capacity_bytes: int,
        on_change: OnChange | None = None,
        retention: RetentionRules | None = None,
        clock: Callable[[], float] = time.time,
        options: SharedHostOptions | None = None,
    ) -> None:
        """``path``: the daemon's socket, which need not be there yet. ``capacity_bytes``: for all pages of this layout,
        whoever's they are; what the first engine of the layout says is what holds."""
        self.options = options if options is not None else SharedHostOptions()
        self.on_change = on_change
        self._clock = clock
        self._page_bytes, self._fingerprint = layout.page_bytes, layout.fingerprint
        self._slots = capacity_bytes // layout.page_bytes
        self._retention = retention if retention is not None else RetentionRules()
        self._stats = TierStats()
        self._counts = threading.Lock()  # of the statistics
        self._outbox: Outbox[TierChange] = Outbox()
        self._told: dict[PageKey, None] = {}  # pages that ``on_change`` knows of; under the client's lock
        self._used = 0
        self._daemon = SharedClient(
            path, self._hello, self.options, heard=self._hear, lost=self._lose, found=self._find
        )

    @property
    def breaker(self) -> Breaker:
        """Whether the daemon is in use."""
        return self._daemon.breaker

    @property
    def page_bytes(self) -> int:
        """The length of every page."""
        return self._page_bytes

    @property
    def capacity_bytes(self) -> int:
        """The most bytes of pages that all engines' together are."""
        connected = self._daemon.connected
        return (self._slots if connected is None else connected.slots) * self._page_bytes

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``PageTier``. One question to the daemon."""
        reply = self._ask(Exists(list(keys)))
        return [False] * len(keys) if reply is None else reply.flags

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        """See ``PageTier``."""
        check_targets(keys, out, self._page_bytes)
        began_ns = time.perf_counter_ns()
        connected, entries = self._acquire(keys, wanted=True)
        found: list[Found | None] = [None] * len(keys)
        places = [place for place, entry in enumerate(entries) if entry is not None and entry.slot >= 0]
        held = [entry for entry in entries if entry is not None and entry.slot >= 0]
        expired = sum(entry is not None for entry in entries) - len(held)
        spoiled: list[tuple[PageKey, int]] = []
        if connected is not None and held:
            sums = copy_and_hash([out[place] for place in places], [connected.views[entry.slot] for entry in held])
            for place, entry, one in zip(places, held, sums, strict=True):
                if one == entry.checksum:
                    found[place] = Found(one, entry.meta, entry.expires_at_s)
                else:
                    spoiled.append((entry.key, entry.slot))
            self._daemon.send(Release([entry.slot for entry in held], spoiled), connected)
            if spoiled:
                self._ask(Exists([]))  # and hear what became of it
        self._count(keys, found, len(spoiled), expired, is_there=connected is not None, began_ns=began_ns)
        return found

    def put(self, pages: Sequence[Page]) -> list[bool]:
        """See ``PageTier``. Keeps the leading pages when not all fit."""
        if not pages:
            return []
        check_buffers([page.key for page in pages], [page.data for page in pages], self._page_bytes)
        began_ns = time.perf_counter_ns()
        foreign = sum(key_fingerprint(page.key) != self._fingerprint for page in pages)
        wanted = [Entry(page.key, page.meta, page.checksum, self._expiry(page)) for page in pages]
        answer = self._daemon.ask(Reserve(wanted))
        self._deliver()
        if answer is None:
            with self._counts:
                self._stats.dropped += len(pages)
                self._stats.alarm("fingerprint", foreign)
            return [False] * len(pages)
        reply, connected = answer
        mine: dict[int, int] = {}  # places of pages by the slots that they were given
        for place, entry in enumerate(reply.entries):
            if entry is not None and entry.slot >= 0:
                mine.setdefault(entry.slot, place)
        sums = copy_and_hash([connected.views[slot] for slot in mine], [pages[place].data for place in mine.values()])
        written = []
        for (slot, place), one in zip(mine.items(), sums, strict=True):
            if one == pages[place].checksum:
                written.append(msgspec.structs.replace(wanted[place], slot=slot))
        told = self._ask(Publish(written, list(mine)), connected)
        good = {entry.key for entry in written} if told is not None else set()
        answers = [entry is not None and (entry.slot < 0 or entry.key in good) for entry in reply.entries]
        with self._counts:
            stats = self._stats
            stats.puts += 0 if told is None else told.count
            stats.evictions += reply.count
            stats.alarm("fingerprint", foreign)
            stats.dropped += len({page.key for page, done in zip(pages, answers, strict=True) if not done}) - foreign
            stats.put_latency.observe(time.perf_counter_ns() - began_ns)
        return answers

    def lend(self, keys: Sequence[PageKey]) -> Loan:
        """See ``LendingTier``. The daemon keeps them until they are taken back, or this process is gone."""
        connected, entries = self._acquire(keys, wanted=False)
        if connected is None:
            return Loan([], [])
        held = [entry for entry in entries if entry is not None and entry.slot >= 0]
        pages = [Page(e.key, e.meta, connected.views[e.slot], e.checksum, e.expires_at_s) for e in held]
        return Loan(pages, [connected.first_slot + entry.slot for entry in held])

    def take_back(self, loan: Loan) -> None:
        """See ``LendingTier``. What a daemon lent that is gone is nobody's."""
        connected = self._daemon.connected
        if connected is not None and loan.slots:
            mine = [slot - connected.first_slot for slot in loan.slots]
            self._daemon.send(Release([slot for slot in mine if 0 <= slot < connected.slots]), connected)

    def remove(self, keys: Sequence[PageKey]) -> int:
        """See ``PageTier``. For every engine."""
        return self._counted(Remove(list(keys)))

    def forget(self, namespace: Namespace) -> int:
        """See ``PageTier``. For every engine; a daemon that is away has nothing to forget."""
        return self._counted(Forget(namespace.salt, namespace.adapter))

    def pin(self, keys: Sequence[PageKey], *, for_s: float = PIN_S) -> list[bool]:
        """See ``PageTier``. Also ends with this process."""
        reply = self._ask(Pin(list(keys), for_s))
        return [False] * len(keys) if reply is None else reply.flags

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """See ``PageTier``."""
        self._daemon.send(Unpin(list(keys)), self._daemon.connected)

    def retire(self, keys: Sequence[PageKey]) -> None:
        """See ``PageTier``."""
        self._ask(Retire(list(keys)))

    def scan(self) -> Iterator[tuple[PageKey, PageMeta]]:
        """See ``PageTier``. A snapshot, oldest first."""
        reply = self._ask(Scan())
        return iter([] if reply is None else [(entry.key, entry.meta) for entry in reply.entries if entry is not None])

    def announce(self, limit: int) -> int:
        """See ``PageTier``."""
        pages = tuple(self.scan())[:limit]
        with self._daemon.lock:
            self._tell(PagesStored(self.tier, pages) if pages else None)
        self._deliver()
        return len(pages)

    def clear(self) -> None:
        """See ``PageTier``. For every engine of this layout."""
        self._ask(Clear())

    def stats(self) -> TierStats:
        """See ``PageTier``. Hits and puts are this process's, ``used_bytes`` is everybody's."""
        self._ask(Exists([]))
        with self._counts:
            self._stats.used_bytes = self._used * self._page_bytes
            self._stats.read_bytes = self._stats.hits * self._page_bytes
            self._stats.written_bytes = self._stats.puts * self._page_bytes
            return self._stats.copy()

    def check(self) -> None:
        """See ``PageTier``. Asks the daemon to check its accounts."""
        reply = self._ask(Check())
        assert reply is None or not reply.problem, reply.problem

    def close(self) -> None:
        """See ``PageTier``. The pages stay, for the others and for the next of us."""
        self._daemon.close()
        self._deliver()

    def _acquire(self, keys: Sequence[PageKey], *, wanted: bool) -> tuple[Connected | None, list[Entry | None]]:
        answer = self._daemon.ask(Acquire(list(keys), wanted))
        self._deliver()
        return (None, [None] * len(keys)) if answer is None else (answer[1], list(answer[0].entries))

    def _ask(self, request: Request, of: Connected | None = None) -> Reply | None:
        """Return the daemon's reply, ``None`` if there is none, or if the connection is another than ``of``."""
        answer = self._daemon.ask(request, of)
        self._deliver()
        return None if answer is None else answer[0]

    def _hear(self, reply: Reply) -> None:
        """Take what every reply tells; the client's lock is held."""
        self._used = reply.used
        for change in reply.changes:
            self._tell(PagesStored(self.tier, tuple(change.stored)) if change.stored else None)
            self._tell(PagesRemoved(self.tier, tuple(change.removed)) if change.removed else None)

    def _lose(self) -> None:
        """The connection has ended: no page is within reach. The client's lock is held."""
        self._used = 0
        if self._told:
            self._tell(PagesRemoved(self.tier, tuple(self._told)))

    def _find(self) -> None:
        """There is a connection again; what is there is told once questions are asked again."""

        def announce() -> None:
            if self.breaker.wait_closed(_ANNOUNCE_S):
                self.announce(self._slots)

        if self.on_change is not None:
            threading.Thread(target=announce, name="kvstore-shared-announce", daemon=True).start()

    def _hello(self) -> Hello:
        default = self._retention.default.quota_bytes
        quotas = [
            (space.salt, space.adapter, None if rule.quota_bytes is None else rule.quota_bytes // self._page_bytes)
            for space, rule in self._retention.by_namespace.items()
        ]
        return Hello(
            WIRE_VERSION,
            self._fingerprint,
            self._page_bytes,
            self._slots * self._page_bytes,
            follows=self.options.follows or self.on_change is not None,
            quota_pages=None if default is None else default // self._page_bytes,
            quotas=quotas if self._retention.has_quotas else [],
        )

    def _counted(self, request: Request) -> int:
        reply = self._ask(request)
        return 0 if reply is None else reply.count

    def _count(
        self,
        keys: Sequence[PageKey],
        found: Sequence[Found | None],
        spoiled: int,
        expired: int,
        *,
        is_there: bool,
        began_ns: int,
    ) -> None:
        missing = [key for key, answer in zip(keys, found, strict=True) if answer is None]
        foreign = sum(key_fingerprint(key) != self._fingerprint for key in missing) if is_there else 0
        with self._counts:
            stats = self._stats
            stats.hits += len(keys) - len(missing)
            stats.miss("fingerprint", foreign)
            stats.alarm("fingerprint", foreign)
            stats.miss("checksum", spoiled)
            stats.alarm("checksum", spoiled)
            stats.miss("expired", expired)
            stats.miss("absent" if is_there else "unavailable", len(missing) - foreign - spoiled - expired)
            stats.get_latency.observe(time.perf_counter_ns() - began_ns)

    def _expiry(self, page: Page) -> int:
        if page.expires_at_s:
            return page.expires_at_s
        ttl_s = self._retention.rule(page.meta.namespace).ttl_s
        return 0 if ttl_s is None else max(1, int(self._clock() + ttl_s))

    def _tell(self, change: TierChange | None) -> None:
        """Queue a change in order; the client's lock is held."""
        if change is None or self.on_change is None:
            return
        if isinstance(change, PagesStored):
            self._told.update((key, None) for key, _ in change.pages)
        else:
            for key in change.keys:
                self._told.pop(key, None)
        self._outbox.append(change)

    def _deliver(self) -> None:
        if self.on_change is not None:
            self._outbox.drain(self.on_change)
