"""The pool tier: pages in a Redis or Valkey server or cluster that many engines share.

A page is one value: a sealed header, then its bytes; so a server that evicts one page leaves no torn pair behind. Every
request has a deadline and none is retried: a server that is slow, paused or gone costs one deadline, trips the breaker,
and is a miss until a probe in the background finds it again.

The bytes that this process has put are accounted for in a ``SlotTable`` (the same one that other tiers keep pages in),
so that they never exceed ``capacity_bytes``; the server's own ``maxmemory`` bounds all of its clients together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.announce import parents_first
from kvstore.breaker import Breaker
from kvstore.codec import PageHeader, checksum, seal, sealed_length, unseal, verify_header
from kvstore.errors import RecordError
from kvstore.memory import copy_bytes, page_rows
from kvstore.page import PageKey, PageLayout, PageMeta, Tier, key_fingerprint
from kvstore.policy import EvictionPolicy
from kvstore.tiers.base import Found, OnChange, Page, PagesRemoved, PagesStored
from kvstore.tiers.pool_client import SCAN_NAMES, PoolClient, PoolOptions
from kvstore.tiers.slotted import Fault, SlottedTier, check_buffers

_HEADER_GUESS_BYTES = 1024
_HEADER_ROOM_BYTES = 1024  # of salt, adapter and everything but the tokens


class PoolTier(SlottedTier):
    """Pages of one layout in a shared server. Satisfies ``PageTier``; ``pin`` covers only what this process put."""

    tier = Tier.POOL

    def __init__(
        self,
        layout: PageLayout,
        url: str,
        *,
        capacity_bytes: int,
        on_change: OnChange | None = None,
        policy: EvictionPolicy[PageKey] | None = None,
        options: PoolOptions | None = None,
    ) -> None:
        """``url`` is ``redis://``, ``rediss://``, ``unix://`` or ``redis+cluster://``. Needs no server yet.

        Raises ``MediumError`` for a URL that is none of these.
        """
        super().__init__(layout, slots=capacity_bytes // layout.page_bytes, on_change=on_change, policy=policy)
        options = options if options is not None else PoolOptions()
        self._server = PoolClient(url, options)
        self._read_s = options.read_deadline_s
        self._prefix = b"keepwarm:%s:" % self._fingerprint.hex().encode()
        self._request_pages = max(1, options.request_bytes // self.page_bytes)
        self._values = page_rows(self._request_pages, _HEADER_ROOM_BYTES + 4 * layout.page_tokens + self.page_bytes)

    @property
    def breaker(self) -> Breaker:
        """Whether the server is in use."""
        return self._server.breaker

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``PageTier``. One round trip."""
        return self._alive(keys) or [False] * len(keys)

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        """See ``PageTier``."""
        check_buffers(keys, out, self.page_bytes)
        known = self._publications(keys)
        answers: list[Found | str] = ["fingerprint"] * len(keys)
        ours = [place for place, key in enumerate(keys) if key_fingerprint(key) == self._fingerprint]
        for start in range(0, len(ours), self._request_pages):
            places = ours[start : start + self._request_pages]
            values = self._server.ask([("GET", self._name(keys[place])) for place in places], self._read_s)
            for place, value in zip(places, values or ["unavailable"] * len(places), strict=True):
                answers[place] = self._accept(keys[place], value, out[place])
        self._settle_reads(keys, answers, known)
        return [answer if isinstance(answer, Found) else None for answer in answers]

    def put(self, pages: Sequence[Page]) -> list[bool]:
        """See ``PageTier``. One round trip to learn what is there, then only the rest is sent."""
        keys = [page.key for page in pages]
        check_buffers(keys, [page.data for page in pages], self.page_bytes)
        known = self._publications(keys)
        alive = self._alive(keys)
        if alive is None:
            with self._lock:
                self._stats.dropped += len(pages)
            return [False] * len(pages)
        self._touch([key for key, there in zip(keys, alive, strict=True) if there])
        self._forget_evicted([(key, was) for key, was, there in zip(keys, known, alive, strict=True) if not there])
        stored = iter(super().put([page for page, there in zip(pages, alive, strict=True) if not there]))
        return [there or next(stored) for there in alive]

    def remove(self, keys: Sequence[PageKey]) -> int:
        """See ``PageTier``. For every client of the server."""
        with self._writing:
            ours = [key for key in keys if key_fingerprint(key) == self._fingerprint]
            counts = self._server.ask([("UNLINK", self._name(key)) for key in ours])
            with self._lock:
                known = [self._table.remove(key) for key in ours]
                unlinked = [count == 1 for count in counts] if counts is not None else known
                gone = tuple(key for key, a, b in zip(ours, known, unlinked, strict=True) if a or b)
                self._tell(PagesRemoved(self.tier, gone) if gone else None)
        self._deliver()
        return sum(unlinked)

    def scan(self) -> Iterator[tuple[PageKey, PageMeta]]:
        """See ``PageTier``. Reads the headers of all that the server holds of this layout, whoever put it."""
        names = self._server.names(self._prefix)
        while batch := list(islice(names, SCAN_NAMES)):
            heads = self._server.ask([("GETRANGE", name, 0, _HEADER_GUESS_BYTES - 1) for name in batch])
            for name, head in zip(batch, heads or [], strict=False):
                if isinstance(head, bytes) and (entry := self._entry_of(name, head)) is not None:
                    yield entry

    def announce(self, limit: int) -> int:
        """See ``PageTier``. Parents first."""
        pages = tuple(parents_first(list(islice(self.scan(), limit))))
        with self._lock:
            self._tell(PagesStored(self.tier, pages) if pages else None)
        self._deliver()
        return len(pages)

    def clear(self) -> None:
        """See ``PageTier``. This layout's pages, for every client of the server."""
        self.remove([key for name in self._server.names(self._prefix) if (key := self._key_of(name)) is not None])
        super().clear()

    def close(self) -> None:
        """See ``PageTier``. The server keeps its pages."""
        self._server.close()

    def _available(self) -> bool:
        return self._server.available

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        raise AssertionError("pages are asked of the server by name, never by slot")

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        written: list[bool] = []
        for start in range(0, len(pages), self._request_pages):
            request = [page for _, page in pages[start : start + self._request_pages]]
            values = [self._value(page, memoryview(row)) for page, row in zip(request, self._values, strict=False)]
            commands = [("SET", self._name(page.key), value) for page, value in zip(request, values, strict=True)]
            written += [reply in (True, b"OK") for reply in self._server.ask(commands) or [None] * len(request)]
        return written

    def _record(self, stored: Sequence[tuple[int, Page]], evicted: Sequence[PageKey]) -> bool:
        if evicted:
            self._server.ask([("UNLINK", self._name(key)) for key in evicted])
        return True

    def _value(self, page: Page, buffer: memoryview) -> memoryview | bytes:
        """Return header and bytes as one value, in ``buffer`` when it is long enough."""
        header = seal(page.key, PageHeader(page.key, self.page_bytes, page.checksum, page.meta))
        size = len(header) + self.page_bytes
        if size > len(buffer):  # a salt or adapter name of more than a thousand characters
            return header + bytes(page.data)
        buffer[: len(header)] = header
        copy_bytes(buffer[len(header) : size], page.data)
        return buffer[:size]

    def _accept(self, key: PageKey, value: object, out: memoryview) -> Found | str:
        """Copy a value's page out and return what it is, or why it is refused."""
        if value is None:
            return "absent"
        if not isinstance(value, bytes):
            return "unavailable" if value == "unavailable" else "record"
        try:
            header, start = unseal(key, value, PageHeader)
            verify_header(header, key, self.page_bytes)
            if len(value) != start + self.page_bytes:
                return "length"
        except RecordError as error:
            return error.reason
        copy_bytes(out, memoryview(value)[start:])
        return Found(header.checksum, header.meta) if checksum(out) == header.checksum else "checksum"

    def _settle_reads(
        self, keys: Sequence[PageKey], answers: Sequence[Found | str], known: Sequence[object | None]
    ) -> None:
        """Count a batch of reads, keep the accounts in step with the server, drop what did not verify."""
        hits, evicted, corrupt = [], [], []
        with self._lock:
            for key, answer, publication in zip(keys, answers, known, strict=True):
                if isinstance(answer, Found):
                    self._stats.hits += 1
                    hits.append(key)
                    continue
                self._stats.miss(answer)
                if answer == "absent":
                    evicted.append((key, publication))
                elif answer != "unavailable":
                    self._stats.alarm(answer)
                    corrupt.append(key)
        self._touch(hits)
        self._forget_evicted(evicted)
        if corrupt:
            self.remove(corrupt)

    def _touch(self, keys: Sequence[PageKey]) -> None:
        with self._lock:
            self._table.release([slot for key in keys for slot in self._table.acquire([key])])

    def _publications(self, keys: Sequence[PageKey]) -> list[object | None]:
        """Return what the accounts say of the pages before the server is asked."""
        with self._lock:
            return [self._table.publication(key) for key in keys]

    def _forget_evicted(self, missing: Sequence[tuple[PageKey, object | None]]) -> None:
        """Strike from the accounts what the server no longer had, unless it was put again since."""
        with self._lock:
            lost = [key for key, was in missing if was is not None and self._table.publication(key) is was]
            gone = tuple(key for key in lost if self._table.remove(key))
            self._evicted(gone)
        self._deliver()

    def _alive(self, keys: Sequence[PageKey]) -> list[bool] | None:
        """Ask the server which pages it has; ``None`` when it does not answer. Foreign pages are not asked for."""
        ours = [key for key in keys if key_fingerprint(key) == self._fingerprint]
        replies = self._server.ask([("EXISTS", self._name(key)) for key in ours], self._read_s)
        if replies is None:
            return None
        there = {key for key, reply in zip(ours, replies, strict=True) if reply == 1}
        return [key in there for key in keys]

    def _entry_of(self, name: bytes, head: bytes) -> tuple[PageKey, PageMeta] | None:
        key = self._key_of(name)
        if key is None:
            return None
        if sealed_length(head) > len(head):
            replies = self._server.ask([("GETRANGE", name, 0, sealed_length(head) - 1)])
            head = replies[0] if replies and isinstance(replies[0], bytes) else head
        try:
            header, _ = unseal(key, head, PageHeader)
            verify_header(header, key, self.page_bytes)
        except RecordError as error:
            with self._lock:
                self._stats.alarm(error.reason)
            return None
        return key, header.meta

    def _name(self, key: PageKey) -> bytes:
        return self._prefix + key[len(self._fingerprint) :].hex().encode()

    def _key_of(self, name: bytes) -> PageKey | None:
        try:
            return self._fingerprint + bytes.fromhex(name[len(self._prefix) :].decode())
        except ValueError:  # somebody else's key under our prefix
            return None
