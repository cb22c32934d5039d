"""The daemon behind a host tier that the engine processes of one machine share: ``keepwarm store serve-host``.

It keeps the accounts, one slab of memory for each layout, and never touches a page. Engines map the slab, ask here
which slot a page has or may have, and move bytes themselves. Whatever a connection was given (pins of readers, slots of
writers, pins by name) ends with it, so an engine that was killed leaves nothing behind: its memory is unmapped before
its connection is closed. When the daemon dies its pages are gone, and engines go on without them until it is back.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import threading
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from kvstore.errors import MediumError
from kvstore.page import Namespace, PageKey, PageMeta, key_fingerprint
from kvstore.policies.learned_reuse import LearnedReuse
from kvstore.slots import SlotTable
from kvstore.tiers.shared_wire import (
    WIRE_VERSION,
    Acquire,
    Change,
    Check,
    Clear,
    Entry,
    Exists,
    Forget,
    Frames,
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
)

log = logging.getLogger(__name__)

_MOST_CHANGES = 10_000  # untold, of one connection; then it is cut, and comes back to learn all anew
_HELLO_S = 5.0
_EXPIRED = PageMeta(None, b"")


class SharedSlab:
    """The memory of one layout and its accounts. Thread-safe."""

    def __init__(self, hello: Hello, slots: int, clock: Callable[[], float]) -> None:
        """Take the memory and touch it. Raises ``MediumError``."""
        self.fingerprint, self.page_bytes, self.slots = hello.fingerprint, hello.page_bytes, slots
        self.bytes = slots * hello.page_bytes
        self.clock = clock
        self.fd = os.memfd_create("keepwarm-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, self.bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(self.fd)
            raise MediumError(f"no memory for {slots} pages of {hello.page_bytes} bytes: {error}") from error
        self.lock = threading.Lock()
        self._quotas = {Namespace(salt, adapter): pages for salt, adapter, pages in hello.quotas}
        self._quota = hello.quota_pages
        self.has_quotas = bool(self._quotas) or self._quota is not None
        self.table = SlotTable(slots, LearnedReuse(), self._quota_pages)
        self.sums = [0] * slots
        self.sessions: set[Session] = set()

    def tell(self, stored: list[tuple[PageKey, PageMeta]], removed: list[PageKey]) -> None:
        """Let every engine know, with its next reply; the caller holds the lock."""
        if stored or removed:
            change = Change(stored, removed)
            for session in self.sessions:
                if session.follows and not session.is_behind:
                    session.changes.append(change)
                    if len(session.changes) > _MOST_CHANGES:
                        session.is_behind = True

    def _quota_pages(self, namespace: Namespace) -> int | None:
        return self._quotas.get(namespace, self._quota)


class Session:
    """One engine's connection: what it was given, and what it has not been told yet."""

    def __init__(self, slab: SharedSlab, *, follows: bool) -> None:
        self.slab, self.follows, self.is_behind = slab, follows, False
        self.pins: Counter[int] = Counter()  # by slot: of readers and writers
        self.holds: dict[PageKey, list[float]] = {}  # when they end
        self.changes: deque[Change] = deque()
        with slab.lock:
            slab.sessions.add(self)

    def answer(self, request: Request) -> Reply | None:
        """Do what is asked; ``None`` where no reply is due."""
        slab, table = self.slab, self.slab.table
        with slab.lock:
            now_s = slab.clock()
            table.end_holds(now_s)
            reply = self._do(request, table, now_s)
            if reply is None:
                return None
            changes, self.changes = list(self.changes), deque()
            return msgspec.structs.replace(reply, used=table.published, changes=changes)

    def end(self) -> None:
        """Take back everything that the connection was given."""
        table = self.slab.table
        with self.slab.lock:
            self.slab.sessions.discard(self)
            for key, ends in self.holds.items():
                for until_s in ends:
                    table.unhold(key, until_s)
            table.release(list(self.pins.elements()))

    def _do(self, request: Request, table: SlotTable, now_s: float) -> Reply | None:
        match request:
            case Exists(keys):
                return Reply(flags=[table.find(key) is not None and not table.is_expired(key, now_s) for key in keys])
            case Acquire(keys, wanted):
                return Reply(entries=[self._acquire(key, wanted, now_s) for key in keys])
            case Reserve(pages):
                return self._reserve(pages)
            case Publish(pages, slots):
                return self._publish(pages, slots)
            case Release(slots, spoiled):
                self._drop([key for key, slot in spoiled if table.find(key) == slot])
                self._release(slots)
                return None
            case Remove(keys):
                return Reply(count=self._drop(keys))
            case Forget(salt, adapter):
                return Reply(count=self._drop(table.keys_of(Namespace(salt, adapter))))
            case Pin(keys, for_s):
                flags = [table.hold(key, now_s + for_s) for key in keys]
                for key, is_held in zip(keys, flags, strict=True):
                    if is_held:
                        insort(self.holds.setdefault(key, []), now_s + for_s)
                return Reply(flags=flags)
            case Unpin(keys):
                for key in reversed(keys):
                    if ends := self.holds.get(key):
                        table.unhold(key, ends.pop(0))
                return None
            case Retire(keys):
                for key in reversed(keys):
                    table.retire(key)
                return Reply()
            case Scan():
                return Reply(entries=[Entry(key, meta, 0, 0) for key, meta in table.entries()])
            case Clear():
                return Reply(count=self._drop([key for key, _ in table.entries()]))
            case Check():
                try:
                    table.check()
                except AssertionError as error:
                    return Reply(problem=str(error))
                return Reply()
            case Hello():
                return Reply(problem="a second hello")

    def _acquire(self, key: PageKey, wanted: bool, now_s: float) -> Entry | None:
        table = self.slab.table
        if table.is_expired(key, now_s):
            self._drop([key])
            return Entry(key, _EXPIRED, 0, 0)
        for slot in table.acquire([key], wanted=wanted):
            self.pins[slot] += 1
            return Entry(key, table.meta(slot), self.slab.sums[slot], table.expires_at_s(key), slot)
        return None

    def _reserve(self, pages: list[Entry]) -> Reply:
        """Answer an entry for each page: slot -1 if it is there, ``None`` without room; ``count`` were evicted."""
        table = self.slab.table
        ours = [page for page in pages if key_fingerprint(page.key) == self.slab.fingerprint]
        present = [slot for page in ours for slot in table.acquire([page.key])]
        there = {page.key for page in ours if table.find(page.key) is not None}
        fresh = list({page.key: page for page in ours if page.key not in there}.values())
        fresh, made_room = self._within_quotas(fresh)
        taken = table.allocate(min(len(fresh), table.free + table.evictable))
        table.release(present)
        slots, evicted = taken if taken is not None else ([], [])
        evicted = made_room + evicted
        self.pins.update(slots)
        self.slab.tell([], evicted)
        slot_of = dict(zip((page.key for page in fresh), slots, strict=False))
        entries = [
            Entry(page.key, page.meta, 0, 0, slot_of.get(page.key, -1))
            if page.key in there or page.key in slot_of
            else None
            for page in pages
        ]
        return Reply(entries=list(entries), count=len(evicted))

    def _within_quotas(self, pages: list[Entry]) -> tuple[list[Entry], list[PageKey]]:
        """Return the leading pages of each namespace that its quota allows, and what it gave up for them."""
        if not self.slab.has_quotas:
            return pages, []
        granted, evicted = {}, []
        for namespace, count in Counter(page.meta.namespace for page in pages).items():
            granted[namespace], gone = self.slab.table.grant(namespace, count)
            evicted += gone
        kept = []
        for page in pages:
            if granted[page.meta.namespace]:
                granted[page.meta.namespace] -= 1
                kept.append(page)
        return kept, evicted

    def _publish(self, pages: list[Entry], slots: list[int]) -> Reply:
        table, stored = self.slab.table, []
        for page in pages:
            is_mine = self.pins[page.slot] > 0 and table.entry(page.slot) is None
            if is_mine and table.publish(page.slot, page.key, page.meta, page.expires_at_s):
                self.slab.sums[page.slot] = page.checksum
                stored.append((page.key, page.meta))
        self.slab.tell(stored, [])
        self._release(slots)
        return Reply(count=len(stored))

    def _drop(self, keys: list[PageKey]) -> int:
        table = self.slab.table
        gone = [key for key in keys if table.remove(key)]
        self.slab.tell([], gone)
        return len(gone)

    def _release(self, slots: list[int]) -> None:
        """Take pins that this connection has; others are not its own to give."""
        mine = []
        for slot in slots:
            if self.pins[slot] > 0:
                self.pins[slot] -= 1
                mine.append(slot)
        self.slab.table.release(mine)


class SharedHost:
    """Listens on a socket until it is closed. One thread for each engine."""

    def __init__(self, path: Path, *, capacity_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """Raises ``MediumError`` where the socket cannot be had, also because another daemon has it."""
        self._path, self._capacity_bytes, self._clock = path, capacity_bytes, clock
        self._slabs: dict[bytes, SharedSlab] = {}
        self._lock = threading.Lock()  # of slabs and connections
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._claim = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # of a daemon that was killed: its claim would be held else
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen(64)
        except OSError as error:
            self._socket.close()
            raise MediumError(f"cannot serve a host tier at {path}: {error}") from error

    def serve(self) -> None:
        """Take connections until ``close``."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._converse, args=(connection,), name="kvstore-shared", daemon=True).start()

    def close(self) -> None:
        """End every connection; the memory goes when no engine has it mapped any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        self._path.unlink(missing_ok=True)
        for each in (self._socket, *connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        os.close(self._claim)

    def _converse(self, connection: socket.socket) -> None:
        """One connection's thread."""
        session = None
        frames = Frames(connection, msgspec.msgpack.Decoder(Request))
        try:
            connection.settimeout(_HELLO_S)
            session = self._welcome(connection, frames.receive())
            connection.settimeout(None)
            while session is not None and not session.is_behind:
                request = frames.receive()
                if request is None:
                    return
                reply = session.answer(request)
                if reply is not None:
                    connection.sendall(frame(reply))
        except (OSError, msgspec.DecodeError, IndexError) as error:
            log.warning("shared host tier: a connection ended: %s", error)
        finally:
            if session is not None:
                session.end()
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _welcome(self, connection: socket.socket, hello: Request | None) -> Session | None:
        if not isinstance(hello, Hello):
            return None
        with self._lock:
            slab = self._slab_for(hello)
            session = None if isinstance(slab, str) else Session(slab, follows=hello.follows)
        if isinstance(slab, str):
            connection.sendall(frame(Refused(slab)))
            return None
        socket.send_fds(connection, [frame(Welcome(slab.slots))], [slab.fd])
        return session

    def _slab_for(self, hello: Hello) -> SharedSlab | str:
        """Return the layout's slab, made now if need be, or why there is none; the caller holds the lock."""
        if hello.version != WIRE_VERSION:
            return f"it speaks version {WIRE_VERSION}"
        slab = self._slabs.get(hello.fingerprint)
        if slab is not None:
            return slab
        slots = hello.capacity_bytes // max(1, hello.page_bytes)
        for fingerprint, other in list(self._slabs.items()):  # those that nobody uses make room, oldest first
            if slots * hello.page_bytes <= self._free_bytes:
                break
            if not other.sessions:
                os.close(other.fd)
                del self._slabs[fingerprint]
        if not 0 < slots * hello.page_bytes <= self._free_bytes:
            return f"{slots * hello.page_bytes} bytes wanted, {self._free_bytes} free"
        try:
            slab = self._slabs[hello.fingerprint] = SharedSlab(hello, slots, self._clock)
        except MediumError as error:
            return str(error)
        return slab

    @property
    def _free_bytes(self) -> int:
        return self._capacity_bytes - sum(slab.bytes for slab in self._slabs.values())


def serve_until_told(path: Path, capacity_bytes: int) -> None:
    """Serve until SIGINT or SIGTERM; for a process of its own. Raises ``MediumError``."""
    host = SharedHost(path, capacity_bytes=capacity_bytes)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: host.close())
    print(f"{path}: a host tier of {capacity_bytes / 1e9:g} GB", flush=True)
    host.serve()
