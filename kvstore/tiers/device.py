"""The device tier: the KV cache that the model itself reads and writes.

A page is ``kv[slot]``; the engine allocates slots, computes into them, and publishes those that are full. Matching a
prompt is ``acquire``; nothing is copied. On a CPU the tensor lies in page-aligned memory that other tiers copy from and
to; from and to a GPU pages cross on streams beside the engine's (``kvstore.tiers.device_copies``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.memory import ByteRows, page_rows
from kvstore.page import PageKey, PageLayout, PageMeta, Tier
from kvstore.policy import EvictionPolicy, PrefixLru
from kvstore.tiers.base import OnChange, Page, PagesStored
from kvstore.tiers.device_copies import OpenCopies, open_copies
from kvstore.tiers.slotted import Fault, SlottedTier


class DeviceTier(SlottedTier):
    """Pages of one layout in one tensor, for one engine process. Satisfies ``PageTier``.

    ``kv`` has shape (pages, layers, 2, page_tokens, kv_heads, head_dim) (one plane instead of 2 under MLA) and the
    layout's dtype; ``kv[slot]`` is contiguous. ``allocate``, ``acquire``, ``publish`` and ``release`` stand on the
    engine's step path: about a microsecond a page, no bytes touched; on a GPU the last two put the engine's current
    stream in order with the copies, which is some microseconds a call.
    """

    tier = Tier.DEVICE

    def __init__(
        self,
        layout: PageLayout,
        *,
        pages: int,
        device: str = "cpu",
        on_change: OnChange | None = None,
        policy: EvictionPolicy[PageKey] | None = None,
        copies: OpenCopies = open_copies,
    ) -> None:
        """``copies`` is how pages get in and out; tests bring their own."""
        super().__init__(layout, slots=pages, on_change=on_change, policy=policy)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        shape = (pages, *layout.page_shape)
        if torch.device(device).type == "cpu":
            self.kv = torch.from_numpy(page_rows(pages, self.page_bytes).reshape(-1)).view(dtype).view(shape)
        else:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self._copies = copies(self.kv.view(pages, -1).view(torch.uint8))
        self._sums: list[int | None] = [None] * pages  # of published pages, once somebody asked

    def allocate(self, count: int) -> list[int] | None:
        """Return ``count`` slots, each pinned once for the caller, evicting if need be; ``None`` if impossible."""
        with self._lock:
            if self._table.has_holds:
                self._table.end_holds(self._clock())
            taken = self._table.allocate(count)
            if taken is None:
                return None
            slots, evicted = taken
            self._evicted(evicted)
        if evicted:
            self._deliver()
        return slots

    def acquire(self, keys: Sequence[PageKey]) -> list[int]:
        """Return the slots of the leading run of published pages, each pinned once for the caller."""
        with self._lock:
            slots = self._table.acquire(keys)
            self._stats.hits += len(slots)
            self._stats.miss("absent", len(keys) - len(slots))
        return slots

    def publish(self, slot: int, key: PageKey, meta: PageMeta) -> bool:
        """Make a full, pinned slot findable; its bytes must not change any more.

        ``False`` if another slot already holds the page: this one stays private, and is as good for its owner.
        """
        return self.publish_all([(slot, key, meta)])[0]

    def publish_all(self, pages: Sequence[tuple[int, PageKey, PageMeta]]) -> list[bool]:
        """Do ``publish`` for each (slot, key, meta), told as one change: a chain given in order is then one event.

        What the caller's current stream has been given so far comes before any copy of these pages.
        """
        if not pages:
            return []
        self._copies.order_reads()
        with self._lock:
            published = [self._table.publish(slot, key, meta) for slot, key, meta in pages]
            stored = [page for page, done in zip(pages, published, strict=True) if done]
            for slot, _, _ in stored:
                self._sums[slot] = None
            self._stats.puts += len(stored)
            self._tell(PagesStored(self.tier, tuple((key, meta) for _, key, meta in stored)) if stored else None)
        self._deliver()
        return published

    def retain(self, slots: Sequence[int]) -> None:
        """Add one pin to each; they are published, or pinned already."""
        with self._lock:
            self._table.retain(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Take one pin from each. An unpinned private slot is free, an unpinned published one evictable.

        Give a sequence's slots front to back: its prefix then outlives its suffix. What the caller's current stream has
        been given so far comes before any page that is copied into them.
        """
        self._copies.order_writes()
        with self._lock:
            self._table.release(slots)

    def entry(self, slot: int) -> tuple[PageKey, PageMeta] | None:
        """Return what is published in a slot."""
        with self._lock:
            return self._table.entry(slot)

    def view(self, slot: int) -> memoryview | None:
        """Return the slot's memory where the processor can reach it, else ``None``. The caller pins the slot."""
        return self._copies.view(slot)

    def hand_over(self) -> None:
        """What the caller's current stream has been given so far comes before any page that is copied in from now on:
        for slots that it has used itself and still holds."""
        self._copies.order_writes()

    def copy_in(self, slots: Sequence[int], data: Sequence[memoryview]) -> bool:
        """Fill pinned private slots; ``False``, and an alarm for each page, when the device failed.

        What is in the slots then is unspecified.
        """
        if self._copies.write(slots, data):
            return True
        self._alarm("copy", len(slots))
        return False

    def copy_out(self, slots: Sequence[int], out: Sequence[memoryview]) -> list[int | None]:
        """Copy pinned published slots' pages; return their checksums, each computed the first time.

        ``None``, and an alarm, for a page that is not what it was, or when the device failed.
        """
        answers = self._read(list(zip(slots, out, strict=True)))
        self._alarm("checksum", answers.count(Fault.CHECKSUM))
        return [None if isinstance(answer, Fault) else answer for answer in answers]

    def lock(self, rows: ByteRows) -> None:
        """Prepare host memory that pages are copied from and to; it is kept until ``close``."""
        self._copies.lock(rows)

    def close(self) -> None:
        """See ``PageTier``."""
        self._copies.close()

    def _default_policy(self) -> EvictionPolicy[PageKey]:
        return PrefixLru()  # on the engine's step path, where a page may cost a microsecond

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        slots = [slot for slot, _ in wanted]
        found = self._copies.read(slots, [out for _, out in wanted])
        if found is None:
            self._alarm("copy", len(wanted))
            return [Fault.UNAVAILABLE] * len(wanted)
        answers: list[int | Fault] = []
        for slot, one in zip(slots, found, strict=True):
            known = self._sums[slot]
            if known is None:
                known = self._sums[slot] = one
            answers.append(one if one == known else Fault.CHECKSUM)
        return answers

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        return [self.copy_in([slot for slot, _ in pages], [page.data for _, page in pages])] * len(pages)

    def _alarm(self, reason: str, count: int) -> None:
        if count:
            with self._lock:
                self._stats.alarm(reason, count)

    def _publish(self, slot: int, page: Page) -> bool:
        self._sums[slot] = page.checksum
        return super()._publish(slot, page)
