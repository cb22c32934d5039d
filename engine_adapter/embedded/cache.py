"""What the engine does with the store: find a prompt's pages, bring them up, make new ones findable, let go.

Reuse is by whole pages and always leaves at least one prompt token to compute, since only computing yields logits.
Whatever the store cannot deliver is computed instead; nothing here fails a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum

from engine_adapter.embedded.sequence import Sequence
from kvstore.block import content_hashes, token_bytes
from kvstore.page import PageKey, PageMeta, Tier, page_key
from kvstore.store import TieredStore

log = logging.getLogger(__name__)


class Admission(Enum):
    """What came of trying to give a sequence its pages."""

    READY = "ready"  # it holds pages for all its tokens and the next one; some may still be loading
    NO_ROOM = "no room"  # nothing changed; try again when pages were released
    PREFIX_PENDING = "prefix"  # nothing changed; somebody is computing the next page it needs


class PageCache:
    """The page tables' keeper. Used from the engine's thread alone."""

    def __init__(self, store: TieredStore, on_loaded: Callable[[], None] = lambda: None) -> None:
        """``on_loaded`` is called from any thread whenever a fetch has ended."""
        self.store, self.device = store, store.device
        self.page_tokens = store.device.layout.page_tokens
        self._on_loaded = on_loaded
        self._fingerprint = store.device.layout.fingerprint
        self._pending: Counter[PageKey] = Counter()  # prompt pages that an admitted sequence will compute
        self._promised: dict[Sequence, list[PageKey]] = {}  # by whom

    @property
    def available_pages(self) -> int:
        """Pages that ``allocate`` could give now."""
        return self.device.free_pages + self.device.evictable_pages

    def admit(self, sequence: Sequence, reserve: int) -> Admission:
        """Give the sequence pages for all its tokens and one more, the leading ones with KV in them where there is any.

        ``reserve`` pages are left to others. Lower tiers are asked in the background (``sequence.loading``).
        """
        if self.available_pages <= sequence.stalled_pages:
            return Admission.NO_ROOM
        keys = self._keys(sequence, (len(sequence.tokens) - 1) // self.page_tokens)
        matched = self.device.acquire(keys)
        wanted = keys[len(matched) :]
        if wanted and wanted[0] in self._pending:
            self.device.release(matched)
            return Admission.PREFIX_PENDING
        needed = self._pages(len(sequence.tokens) + 1) - len(matched)
        fresh = self.device.allocate(needed) if needed + reserve <= self.available_pages else None
        if fresh is None:
            self.device.release(matched)
            sequence.stalled_pages = self.available_pages
            return Admission.NO_ROOM
        sequence.stalled_pages = -1
        sequence.slots = matched + fresh
        sequence.published = len(matched)
        sequence.computed = len(matched) * self.page_tokens
        self._promised[sequence] = wanted
        self._pending.update(wanted)
        if wanted and self.store.lower:
            sequence.loading = self.store.fetch(wanted, fresh[: len(wanted)])
            sequence.loading.add_done_callback(lambda _: self._on_loaded())
            self._blank(fresh[len(wanted) :])
        else:
            self._blank(fresh)
            sequence.hit_tokens = sequence.hit_tokens or (sequence.computed, 0, 0, 0)
        return Admission.READY

    def loaded(self, sequence: Sequence) -> None:
        """Take over what a finished ``sequence.loading`` brought: those pages count as computed and are published."""
        assert sequence.loading is not None
        assert sequence.loading.done()
        tiers: list[Tier] = []
        if not sequence.loading.cancelled():
            if (error := sequence.loading.exception()) is None:
                tiers = sequence.loading.result()
            else:
                log.error("a fetch failed; its pages are computed instead", exc_info=error)
        sequence.loading = None
        hit_pages = [sequence.published, 0, 0, 0]
        for tier in tiers:
            hit_pages[tier] += 1
        if sequence.hit_tokens is None:
            device, host, disk, pool = (pages * self.page_tokens for pages in hit_pages)
            sequence.hit_tokens = (device, host, disk, pool)
        sequence.computed += len(tiers) * self.page_tokens
        wanted = len(self._promised[sequence])
        self._blank(sequence.slots[sequence.published + len(tiers) : sequence.published + wanted])
        self._publish(sequence)

    def extend(self, sequence: Sequence) -> bool:
        """Make room for every token that there is; ``False`` if the pages are not to be had."""
        missing = -(-len(sequence.tokens) // self.page_tokens) - len(sequence.slots)
        if missing <= 0:
            return True
        fresh = self.device.allocate(missing)
        if fresh is None:
            return False
        self._blank(fresh)
        sequence.slots += fresh
        return True

    def publish(self, sequence: Sequence) -> None:
        """Make the pages that have become full findable, and write them through to the lower tiers."""
        if sequence.computed // self.page_tokens > sequence.published:
            self.store.spill(self._publish(sequence))

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's pages away; the published ones stay findable until they are evicted."""
        assert sequence.loading is None, "the store may still be writing into these pages"
        self._keep_promise(sequence, len(self._promised.get(sequence, ())))
        self._promised.pop(sequence, None)
        self.device.release(sequence.slots)
        sequence.slots = []
        sequence.computed = sequence.published = 0

    def pages_of(self, sequence: Sequence) -> list[PageKey]:
        """Return the keys of the full pages that a sequence has had, prefix first."""
        return self._keys(sequence, len(sequence.hashes))

    def retire(self, keys: list[PageKey]) -> None:
        """The run that these pages belong to has ended: they go before all others."""
        self.store.retire(keys)

    def _blank(self, slots: list[int]) -> None:
        """Zero pages before they are used: attention multiplies what it masks by 0, and 0 times garbage may be NaN."""
        for slot in slots:
            self.device.kv[slot].zero_()

    def _publish(self, sequence: Sequence) -> list[int]:
        """Publish up to ``computed``; return the slots that others can find now."""
        full = sequence.computed // self.page_tokens
        keys = self._keys(sequence, full)
        pages = []
        for page in range(sequence.published, full):
            tokens = sequence.tokens[page * self.page_tokens : (page + 1) * self.page_tokens]
            parent = sequence.hashes[page - 1] if page else None
            meta = PageMeta(parent, token_bytes(tokens), sequence.request.salt)
            pages.append((sequence.slots[page], keys[page], meta))
        published = self.device.publish_all(pages)
        self._keep_promise(sequence, full - sequence.published)
        sequence.published = full
        return [slot for (slot, _, _), is_new in zip(pages, published, strict=True) if is_new]

    def _keep_promise(self, sequence: Sequence, pages: int) -> None:
        """The first ``pages`` of what this sequence was going to compute need not be waited for any more."""
        promised = self._promised.get(sequence, [])
        for key in promised[:pages]:
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]
        del promised[:pages]

    def _keys(self, sequence: Sequence, pages: int) -> list[PageKey]:
        """Return the keys of the leading ``pages`` full pages, hashing only what was not hashed before."""
        known = len(sequence.hashes)
        if known < pages:
            sequence.hashes += content_hashes(
                sequence.tokens[known * self.page_tokens : pages * self.page_tokens],
                self.page_tokens,
                salt=sequence.request.salt,
                parent=sequence.hashes[-1] if known else None,
            )
        return [page_key(self._fingerprint, digest) for digest in sequence.hashes[:pages]]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)
