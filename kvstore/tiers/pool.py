"""The pool tier: pages in a Redis or Valkey server or cluster that many engines share.

A page is one value: a sealed header, then its bytes; so a server that evicts one page leaves no torn pair behind. Bytes
go straight between the caller's memory and the socket. Every request has a deadline and none is retried: a server that
is slow, paused or gone costs one deadline, trips the breaker, and is a miss until a probe in the background finds it
again.

The bytes that this process has put are accounted for in a ``SlotTable`` (the same one that other tiers keep pages in),
so that they never exceed ``capacity_bytes``; the server's own ``maxmemory`` bounds all of its clients together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvstore.announce import parents_first
from kvstore.breaker import Breaker
from kvstore.codec import PageHeader, seal, sealed_length
from kvstore.errors import RecordError
from kvstore.page import KEY_BYTES, Namespace, PageKey, PageLayout, PageMeta, Tier, key_fingerprint
from kvstore.page_forms import PageForms, forms_of
from kvstore.policy import EvictionPolicy
from kvstore.retention import RetentionRules
from kvstore.tiers.base import Found, OnChange, Page, PagesRemoved, PagesStored
from kvstore.tiers.pool_client import SCAN_NAMES, UNAVAILABLE, PoolClient
from kvstore.tiers.pool_debts import ForgetDebts
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.pool_url import without_secret
from kvstore.tiers.pool_values import PoolValues
from kvstore.tiers.slotted import Fault, SlottedTier, check_buffers, check_targets

POOL_PREFIX = b"keepwarm:"
_HEADER_GUESS_BYTES = 1024
_OTHERS = ("unavailable", "form", "unknown_key")
"""Why a page is a miss that is good for somebody else: left where it is."""


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
        retention: RetentionRules | None = None,
        clock: Callable[[], float] = time.time,
        options: PoolOptions | None = None,
    ) -> None:
        """``url``: see ``kvstore.tiers.pool_url``. Needs no server yet. Raises ``MediumError`` for one that is none."""
        super().__init__(
            layout,
            slots=capacity_bytes // layout.page_bytes,
            on_change=on_change,
            policy=policy,
            retention=retention,
            clock=clock,
        )
        self.options = options if options is not None else PoolOptions()
        self._forms = forms_of(layout, self.options.at_rest)
        self._values = PoolValues(self.page_bytes, self._forms, clock)
        self._server = PoolClient(url, self.options)
        self._prefix = POOL_PREFIX + self._fingerprint.hex().encode() + b":"
        self._debts = ForgetDebts(
            f"pool tier {without_secret(url)}", self.breaker.wait_closed, lambda each: self._forget_reachable(each)[1]
        )

    @property
    def breaker(self) -> Breaker:
        """Whether the server, or the cluster, is in use."""
        return self._server.breaker

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``PageTier``. One round trip."""
        return [answer is True for answer in self._alive(keys)]

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        """See ``PageTier``."""
        check_targets(keys, out, self.page_bytes)
        began_ns = time.perf_counter_ns()
        known = self._publications(keys)
        answers: list[Found | str] = ["fingerprint"] * len(keys)
        ours = [place for place, key in enumerate(keys) if key_fingerprint(key) == self._fingerprint]
        deadline_s = self.options.read_s.deadline_s(len(ours) * self.page_bytes)
        if self._forms is not None:
            self._get_formed(keys, out, ours, answers, self._forms, deadline_s)
        else:
            names, rows = [self._name(keys[place]) for place in ours], [out[place] for place in ours]
            for place, value in zip(ours, self._server.get(names, rows, deadline_s, sums=True), strict=True):
                answers[place] = self._values.accept(keys[place], value, out[place])
        if owed := self._debts.owed:
            answers = ["forgotten" if _is_of(owed, answer) else answer for answer in answers]
        self._settle_reads(keys, answers, known)
        with self._lock:
            self._stats.get_latency.observe(time.perf_counter_ns() - began_ns)
        return [answer if isinstance(answer, Found) else None for answer in answers]

    def _get_formed(
        self,
        keys: Sequence[PageKey],
        out: Sequence[memoryview],
        ours: Sequence[int],
        answers: list[Found | str],
        forms: PageForms,
        deadline_s: float,
    ) -> None:
        """Read where pages are stored in forms of their own: through memory of ours."""
        with forms.reader() as workshop:
            for start in range(0, len(ours), len(workshop.rows)):
                part = ours[start : start + len(workshop.rows)]
                rows = workshop.rows[: len(part)]
                values = self._server.get([self._name(keys[place]) for place in part], rows, deadline_s)
                for place, row, value in zip(part, rows, values, strict=True):
                    answers[place] = self._values.accept(keys[place], value, row, out[place], workshop)

    def put(self, pages: Sequence[Page]) -> list[bool]:
        """See ``PageTier``. One round trip to learn what is there, then only the rest is sent."""
        keys = [page.key for page in pages]
        check_buffers(keys, [page.data for page in pages], self.page_bytes)
        known = self._publications(keys)
        alive = self._alive(keys)
        self._touch([key for key, there in zip(keys, alive, strict=True) if there])
        self._forget_evicted([(key, was) for key, was, there in zip(keys, known, alive, strict=True) if there is False])
        fresh = [page for page, there in zip(pages, alive, strict=True) if there is False]
        lost = sum(there is None for there in alive)
        if lost:
            with self._lock:
                self._stats.dropped += lost
        stored = iter(super().put(fresh) if fresh else [])
        return [next(stored) if there is False else there is True for there in alive]

    def remove(self, keys: Sequence[PageKey]) -> int:
        """See ``PageTier``. For every client of the server."""
        return self._remove(keys)[0]

    def _remove(self, keys: Sequence[PageKey]) -> tuple[int, bool]:
        """Remove pages; return how many there were, and whether every server was asked."""
        with self._writing:
            ours = [key for key in keys if key_fingerprint(key) == self._fingerprint]
            counts = self._server.ask(b"UNLINK", [self._name(key) for key in ours])
            with self._lock:
                known = [self._table.remove(key) for key in ours]
                pairs = zip(counts, known, strict=True)
                unlinked = [was if count is UNAVAILABLE else count == 1 for count, was in pairs]
                gone = tuple(key for key, a, b in zip(ours, known, unlinked, strict=True) if a or b)
                self._tell(PagesRemoved(self.tier, gone) if gone else None)
        self._deliver()
        return sum(unlinked), UNAVAILABLE not in counts

    def forget(self, namespace: Namespace) -> int:
        """See ``PageTier``. Reads the header of every page of this layout; for every client of the server.

        Where the server is away, or goes away meanwhile, it is done when it is back, and until then no page of the
        namespace is served by this process; one that ends before that has forgotten what it was to forget.
        """
        removed, is_done = self._forget_reachable(namespace)
        if not is_done:
            self._debts.owe(namespace)
        return removed

    @property
    def forgetting(self) -> frozenset[Namespace]:
        """Namespaces that are to be forgotten once the server is back."""
        return self._debts.owed

    def _forget_reachable(self, namespace: Namespace) -> tuple[int, bool]:
        """Remove what can be reached of a namespace; return how many pages, and whether that was all."""
        entries = list(self._walk())
        ours = [entry[0] for entry in entries if entry is not None and entry[1].namespace == namespace]
        removed, were_asked = self._remove(ours)
        return removed, were_asked and None not in entries

    def scan(self) -> Iterator[tuple[PageKey, PageMeta]]:
        """See ``PageTier``. Reads the headers of all that the server holds of this layout, whoever put it."""
        return (entry for entry in self._walk() if entry is not None)

    def _walk(self) -> Iterator[tuple[PageKey, PageMeta] | None]:
        """Do what ``scan`` does, with ``None`` for what could not be reached."""
        names = self._server.walk(self._prefix)
        while batch := list(islice(names, SCAN_NAMES)):
            present = [name for name in batch if isinstance(name, bytes)]
            heads = self._server.ask(b"GETRANGE", present, b"0", b"%d" % (_HEADER_GUESS_BYTES - 1))
            if len(present) < len(batch) or UNAVAILABLE in heads:
                yield None
            for name, head in zip(present, heads, strict=True):
                if isinstance(head, bytes) and head and (entry := self._entry_of(name, head)) is not None:
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
        self._debts.close()
        self._server.close()

    def _available(self) -> bool:
        return self._server.available

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        raise AssertionError("pages are asked of the server by name, never by slot")

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        deadline_s = self.options.write_s.deadline_s(len(pages) * self.page_bytes)
        if self._forms is not None:
            return self._write_formed(pages, self._forms, deadline_s)
        written = []
        for _, page in pages:
            header = PageHeader(page.key, self.page_bytes, page.checksum, page.meta, self._expiry(page))
            written.append((header, page.data))
        return self._set(written, deadline_s)

    def _write_formed(self, pages: Sequence[tuple[int, Page]], forms: PageForms, deadline_s: float) -> list[bool]:
        """Do what ``_write`` does where pages are stored in forms of their own."""
        done = [False] * len(pages)
        workshop = forms.writer
        for start in range(0, len(pages), len(workshop.rows)):
            written, places = [], []
            for row, place in zip(workshop.rows, range(start, len(pages)), strict=False):
                page = pages[place][1]
                stored = forms.store(page, row, workshop, self._expiry(page))
                if stored is not None:
                    form = stored.told.form
                    written.append((stored.told, row[: self.page_bytes if form is None else form.length]))
                    places.append(place)
            for place, is_stored in zip(places, self._set(written, deadline_s), strict=True):
                done[place] = is_stored
        return done

    def _set(self, pages: Sequence[tuple[PageHeader, memoryview]], deadline_s: float) -> list[bool]:
        now_s = self._clock()
        values = []
        for header, body in pages:
            ends_s = header.expires_at_s
            ttl_ms = max(1, int((ends_s - now_s) * 1000)) if ends_s else 0  # the server ends it, too
            values.append((seal(header.key, header), body, ttl_ms))
        replies = self._server.set([self._name(header.key) for header, _ in pages], values, deadline_s)
        return [reply == b"OK" for reply in replies]

    def _record(self, stored: Sequence[tuple[int, Page]], evicted: Sequence[PageKey]) -> bool:
        if evicted:
            self._server.ask(b"UNLINK", [self._name(key) for key in evicted])
        return True

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
                if answer in ("absent", "expired", "forgotten"):
                    evicted.append((key, publication))
                elif answer not in _OTHERS:
                    self._stats.alarm(answer)
                    corrupt.append(key)
                elif answer == "unknown_key":
                    self._stats.alarm(answer)
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

    def _alive(self, keys: Sequence[PageKey]) -> list[bool | None]:
        """Ask which pages there are; ``None`` where nobody answers. Foreign pages are not there, and not asked for."""
        ours = [key for key in keys if key_fingerprint(key) == self._fingerprint]
        replies = self._server.ask(
            b"EXISTS", [self._name(key) for key in ours], deadline_s=self.options.read_s.deadline_s()
        )
        there = {key: None if reply is UNAVAILABLE else reply == 1 for key, reply in zip(ours, replies, strict=True)}
        return [there.get(key, False) for key in keys]

    def _entry_of(self, name: bytes, head: bytes) -> tuple[PageKey, PageMeta] | None:
        key = self._key_of(name)
        if key is None:
            return None
        if sealed_length(head) > len(head):
            (reply,) = self._server.ask(b"GETRANGE", [name], b"0", b"%d" % (sealed_length(head) - 1))
            head = reply if isinstance(reply, bytes) else head
        try:
            header, _ = self._values.unseal(key, head)
        except RecordError as error:
            with self._lock:
                if error.reason != "form":
                    self._stats.alarm(error.reason)
            return None
        return key, header.meta

    def _name(self, key: PageKey) -> bytes:
        return self._prefix + key[len(self._fingerprint) :].hex().encode()

    def _key_of(self, name: bytes) -> PageKey | None:
        key = named_key(name)
        return key if key is not None and key_fingerprint(key) == self._fingerprint else None


def _is_of(namespaces: frozenset[Namespace], answer: Found | str) -> bool:
    return isinstance(answer, Found) and answer.meta.namespace in namespaces


def named_key(name: bytes) -> PageKey | None:
    """Return the page that a pool keeps under this name; ``None`` for somebody else's name under our prefix."""
    try:
        fingerprint, content_hash = name.removeprefix(POOL_PREFIX).decode().split(":")
        key = bytes.fromhex(fingerprint) + bytes.fromhex(content_hash)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None
