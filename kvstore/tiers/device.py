"""The device tier: the KV cache that the model itself reads and writes.

A page is ``kv[slot]``; the engine allocates slots, computes into them, and publishes those that are full. Matching a
prompt is ``acquire``; nothing is copied. On a CPU the tensor lies in page-aligned memory that other tiers copy from and
to; on a GPU pages cross by ``torch`` copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.codec import checksum
from kvstore.memory import copy_and_hash, copy_bytes, page_rows
from kvstore.page import PageKey, PageLayout, PageMeta, Tier
from kvstore.policy import EvictionPolicy, PrefixLru
from kvstore.tiers.base import OnChange, Page, PagesStored
from kvstore.tiers.slotted import Fault, SlottedTier


class DeviceTier(SlottedTier):
    """Pages of one layout in one tensor, for one engine process. Satisfies ``PageTier``.

    ``kv`` has shape (pages, layers, 2, page_tokens, kv_heads, head_dim) (one plane instead of 2 under MLA) and the
    layout's dtype; ``kv[slot]`` is contiguous. ``allocate``, ``acquire``, ``publish`` and ``release`` stand on the
    engine's step path: about a microsecond a page, no bytes touched.
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
    ) -> None:
        super().__init__(layout, slots=pages, on_change=on_change, policy=policy)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        shape = (pages, *layout.page_shape)
        self._rows = page_rows(pages, self.page_bytes) if torch.device(device).type == "cpu" else None
        if self._rows is None:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.kv = torch.from_numpy(self._rows.reshape(-1)).view(dtype).view(shape)
        self._flat = self.kv.view(pages, -1).view(torch.uint8)
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
        """Do ``publish`` for each (slot, key, meta), told as one change: a chain given in order is then one event."""
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

        Give a sequence's slots front to back: its prefix then outlives its suffix.
        """
        with self._lock:
            self._table.release(slots)

    def entry(self, slot: int) -> tuple[PageKey, PageMeta] | None:
        """Return what is published in a slot."""
        with self._lock:
            return self._table.entry(slot)

    def view(self, slot: int) -> memoryview | None:
        """Return the slot's memory where the processor can reach it, else ``None``. The caller pins the slot."""
        return None if self._rows is None else memoryview(self._rows[slot])

    def copy_in(self, slot: int, data: memoryview) -> None:
        """Fill a pinned private slot."""
        if self._rows is not None:
            copy_bytes(self._rows[slot], data)
        else:
            self._flat[slot].copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8)))

    def copy_out(self, slot: int, out: memoryview) -> int:
        """Copy a pinned published slot's bytes; return the page's checksum, computed the first time."""
        found = self._copy_hashed(slot, out)
        known = self._sums[slot]
        if known is None:
            known = self._sums[slot] = found
        return known

    def _copy_hashed(self, slot: int, out: memoryview) -> int:
        if self._rows is not None:
            return copy_and_hash([out], [memoryview(self._rows[slot])])[0]
        torch.from_numpy(np.frombuffer(out, dtype=np.uint8)).copy_(self._flat[slot])
        return checksum(out)

    def _default_policy(self) -> EvictionPolicy[PageKey]:
        return PrefixLru()  # on the engine's step path, where a page may cost a microsecond

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        answers: list[int | Fault] = []
        for slot, out in wanted:
            found, known = self._copy_hashed(slot, out), self._sums[slot]
            if known is None:
                known = self._sums[slot] = found
            answers.append(found if found == known else Fault.CHECKSUM)
        return answers

    def _write(self, pages: Sequence[tuple[int, Page]]) -> list[bool]:
        for slot, page in pages:
            self.copy_in(slot, page.data)
        return [True] * len(pages)

    def _publish(self, slot: int, page: Page) -> bool:
        self._sums[slot] = page.checksum
        return super()._publish(slot, page)
