"""What the device tier does for an engine, beyond the contract of all tiers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstore.page import Tier
from kvstore.tiers.base import PagesStored, TierChange
from kvstore.tiers.device import DeviceTier
from tests.samples.pages import LAYOUT, buffers, chain, page_data


@pytest.mark.parametrize(("dtype", "is_mla"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_a_page_is_one_contiguous_slot_of_the_tensor(dtype: str, is_mla: bool) -> None:
    layout = replace(LAYOUT, dtype=dtype, is_mla=is_mla)
    tier = DeviceTier(layout, pages=3)
    assert tuple(tier.kv.shape) == (3, layout.layers, 1 if is_mla else 2, 4, layout.kv_heads, layout.head_dim)
    assert tier.kv.dtype == getattr(torch, dtype)
    assert tier.kv[1].is_contiguous()
    assert tier.kv[1].nbytes == layout.page_bytes
    assert tier.kv.data_ptr() % 4096 == 0


def test_what_the_engine_writes_is_what_other_tiers_read() -> None:
    tier = DeviceTier(LAYOUT, pages=2)
    (slot,) = tier.allocate(1)
    tier.kv[slot].copy_(torch.arange(1024).reshape(tier.kv.shape[1:]))
    ((key, meta),) = chain(1)
    assert tier.publish(slot, key, meta)
    out = buffers(1)
    assert tier.get([key], out)[0].meta == meta
    assert bytes(out[0]) == tier.kv[slot].numpy().tobytes()
    view = tier.view(slot)
    assert view is not None
    assert bytes(view) == bytes(out[0])


def test_pages_published_together_are_told_of_together() -> None:
    changes: list[TierChange] = []
    tier = DeviceTier(LAYOUT, pages=8, on_change=changes.append)
    pages = chain(3)
    first, *rest = tier.allocate(4)
    assert tier.publish(first, *pages[1])
    assert tier.publish_all([(s, *p) for s, p in zip(rest, pages, strict=True)]) == [True, False, True]
    assert changes == [PagesStored(Tier.DEVICE, (pages[1],)), PagesStored(Tier.DEVICE, (pages[0], pages[2]))]
    tier.release([first, *rest])
    assert (tier.free_pages, tier.evictable_pages) == (5, 3)  # the second copy of a page is nobody's


def test_a_slot_that_is_used_again_forgets_the_checksum_of_its_last_page() -> None:
    tier = DeviceTier(LAYOUT, pages=1)
    for key, meta in chain(2):
        (slot,) = tier.allocate(1)
        assert tier.copy_in([slot], [memoryview(page_data(key))])
        tier.publish(slot, key, meta)
        tier.release([slot])
        out = buffers(1)
        assert tier.get([key], out) != [None]
        assert bytes(out[0]) == page_data(key)
    assert tier.stats().alarms == {}


def test_misuse_of_pins_is_caught() -> None:
    tier = DeviceTier(LAYOUT, pages=2)
    (slot,) = tier.allocate(1)
    with pytest.raises(AssertionError, match="nobody's"):
        tier.retain([1 - slot])
    tier.release([slot])
    with pytest.raises(AssertionError, match="once too often"):
        tier.release([slot])
    with pytest.raises(AssertionError, match="does not pin it"):
        tier.publish(slot, *chain(1)[0])
