"""A host tier that the engine processes of one machine share: the accounts are a daemon's, the bytes cross no socket.

The daemon (``kvstore.shared_host``, ``keepwarm store serve-host``) says which slot of a common memory a page has; bytes
are moved here, and every page that is read is hashed as it is copied, since other processes write to that memory. A
daemon that is away, late or gone is an immediate miss until a probe in the background finds it again.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kvstore.breaker import Breaker, BreakerOptions
from kvstore.deadline import Allowance
from kvstore.memory import ByteRows, copy_and_hash
from kvstore.outbox import Outbox
from kvstore.page import Namespace, PageKey, PageLayout, PageMeta, Tier, key_fingerprint
from kvstore.retention import RetentionRules
from kvstore.tiers.base import PIN_S, Found, OnChange, Page, PagesRemoved, PagesStored, TierChange, TierStats
from kvstore.tiers.host import Loan
from kvstore.tiers.shared_wire import (
    WIRE_VERSION,
    Acquire,
    Answer,
    Check,
    Clear,
    Entry,
    Exists,
    Forget,
    Hello,
    Pin,
    Publish,
    Refused,
    Release,
    Remove,
    Reply,
    Request,
    Reserve,
    Retire,
    Scan,
    Unpin,
    Welcome,
    frame,
    receive,
)
from kvstore.tiers.slotted import check_buffers

log = logging.getLogger(__name__)

_TAKEN_BYTES_PER_S = 200e6  # of fresh memory, on a busy machine
_ANNOUNCE_S = 10.0
_LIFE = 1 << 32  # slots of one connection's life are told from those of the next by this


@dataclass(frozen=True, slots=True)
class SharedHostOptions:
    """Limits of one engine's share."""

    ask_s: Allowance = field(default_factory=Allowance)  # of one question to the daemon
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class _Connected:
    """One life of the connection: the socket and the memory that came with it."""

    def __init__(self, connection: socket.socket, life: int, fd: int, slots: int, page_bytes: int) -> None:
        self.socket, self.first_slot, self.slots = connection, life * _LIFE, slots
        area = mmap.mmap(fd, slots * page_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        rows: ByteRows = np.frombuffer(area, dtype=np.uint8).reshape(slots, page_bytes)
        self.views = [memoryview(row) for row in rows]  # who holds one keeps the memory, whatever becomes of the daemon
        self.decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


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
        self._path, self._layout, self._clock = path, layout, clock
        self._page_bytes, self._fingerprint = layout.page_bytes, layout.fingerprint
        self._slots = capacity_bytes // layout.page_bytes
        self._retention = retention if retention is not None else RetentionRules()
        self._stats = TierStats()
        self._lock = threading.Lock()  # of the connection: one question at a time
        self._counts = threading.Lock()  # of the statistics
        self._outbox: Outbox[TierChange] = Outbox()
        self._told: dict[PageKey, None] = {}  # pages that ``on_change`` knows of
        self._life = 0
        self._connected: _Connected | None = None
        self._used = 0
        self._closed = False
        self.breaker = Breaker(f"shared host tier {path}", self._probe, self.options.breaker)
        if not self._probe():
            self.breaker.trip("no daemon answers")

    @property
    def page_bytes(self) -> int:
        """The length of every page."""
        return self._page_bytes

    @property
    def capacity_bytes(self) -> int:
        """The most bytes of pages that all engines' together are."""
        return self._slots * self._page_bytes

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``PageTier``. One question to the daemon."""
        reply = self._ask(Exists(list(keys)))
        return [False] * len(keys) if reply is None else reply.flags

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        """See ``PageTier``."""
        check_buffers(keys, out, self._page_bytes)
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
            self._send(Release([entry.slot for entry in held], spoiled), connected)
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
        with self._lock:
            reply = self._ask_locked(Reserve(wanted))
            connected = self._connected
        self._deliver()
        if reply is None or connected is None:
            with self._counts:
                self._stats.dropped += len(pages)
                self._stats.alarm("fingerprint", foreign)
            return [False] * len(pages)
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
        connected = self._connected
        if connected is not None and loan.slots:
            mine = [slot - connected.first_slot for slot in loan.slots]
            self._send(Release([slot for slot in mine if 0 <= slot < connected.slots]), connected)

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
        self._send(Unpin(list(keys)), self._connected)

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
        with self._lock:
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
        self._closed = True
        self.breaker.stop()
        with self._lock:
            self._part("")

    def _acquire(self, keys: Sequence[PageKey], *, wanted: bool) -> tuple[_Connected | None, list[Entry | None]]:
        with self._lock:
            reply = self._ask_locked(Acquire(list(keys), wanted))
            connected = self._connected
        self._deliver()
        if reply is None or connected is None:
            return None, [None] * len(keys)
        return connected, list(reply.entries)

    def _ask(self, request: Request, connected: _Connected | None = None) -> Reply | None:
        """Return the daemon's reply, ``None`` if there is none, or if the connection is another than ``connected``."""
        with self._lock:
            is_mine = connected is None or connected is self._connected
            reply = self._ask_locked(request) if is_mine else None
        self._deliver()
        return reply

    def _ask_locked(self, request: Request) -> Reply | None:
        connected = self._connected
        if connected is None or not self.breaker.closed:
            return None
        try:
            connected.socket.settimeout(self.options.ask_s.seconds())
            connected.socket.sendall(frame(request))
            answer = receive(connected.socket, connected.decoder)
        except (OSError, msgspec.DecodeError) as error:
            self._part(f"no answer: {error}")
            return None
        if not isinstance(answer, Reply):
            self._part("the daemon has closed")
            return None
        self._used = answer.used
        for change in answer.changes:
            self._tell(PagesStored(self.tier, tuple(change.stored)) if change.stored else None)
            self._tell(PagesRemoved(self.tier, tuple(change.removed)) if change.removed else None)
        return answer

    def _send(self, request: Request, connected: _Connected | None) -> None:
        """Tell the daemon something that has no reply, over the connection that it is about."""
        with self._lock:
            if connected is None or connected is not self._connected:
                return
            try:
                connected.socket.settimeout(self.options.ask_s.seconds())
                connected.socket.sendall(frame(request))
            except OSError as error:
                self._part(f"cannot tell it anything: {error}")
        self._deliver()

    def _part(self, reason: str) -> None:
        """Give up the connection, and what it held; the caller holds the lock."""
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.socket.close()
        self._used = 0
        if self._told:
            self._tell(PagesRemoved(self.tier, tuple(self._told)))
        if reason:
            self.breaker.trip(reason)

    def _probe(self) -> bool:
        """Connect, if that is not done; the breaker's thread does it when the daemon was away."""
        try:
            connected = self._connect()
        except (OSError, msgspec.DecodeError, ValueError) as error:
            log.debug("shared host tier %s: %s", self._path, error)
            return False
        with self._lock:
            if self._closed:
                connected.socket.close()
                return True
            self._connected, self._slots = connected, connected.slots
        if self.on_change is not None and self._life > 1:
            threading.Thread(target=self._announce_again, name="kvstore-shared-announce", daemon=True).start()
        return True

    def _announce_again(self) -> None:
        """Tell of what there is after the connection was lost, once questions are asked again."""
        if self.breaker.wait_closed(_ANNOUNCE_S):
            self.announce(self._slots)

    def _connect(self) -> _Connected:
        default = self._retention.default.quota_bytes
        quotas = [
            (space.salt, space.adapter, None if rule.quota_bytes is None else rule.quota_bytes // self._page_bytes)
            for space, rule in self._retention.by_namespace.items()
        ]
        hello = Hello(
            WIRE_VERSION, self._fingerprint, self._page_bytes, self._slots * self._page_bytes,
            self.on_change is not None, None if default is None else default // self._page_bytes,
            quotas if self._retention.has_quotas else [],
        )  # fmt: skip
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fds: list[int] = []
        try:
            connection.settimeout(
                self.options.ask_s.seconds(self._slots * self._page_bytes)
            )  # it may take the memory now
            connection.connect(str(self._path))
            connection.sendall(frame(hello))
            data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            answer = msgspec.msgpack.decode(data[4:], type=Welcome | Refused)
            if isinstance(answer, Refused) or not fds:
                raise ValueError(answer.reason if isinstance(answer, Refused) else "no memory came along")
            self._life += 1
            return _Connected(connection, self._life, fds[0], answer.slots, self._page_bytes)
        except BaseException:
            connection.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

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
        """Queue a change in order; the caller holds the lock."""
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
