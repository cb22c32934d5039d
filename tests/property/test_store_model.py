"""The tiered store against a naive model: a dictionary of everything that was ever computed.

Whatever is computed, written through, evicted, cleared, restarted and fetched again in whatever order: a page that
comes back is the page that went in, the hits are a leading run, and what must still be there is.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.deadline import Allowance
from kvstore.page import PageKey, PageMeta, Tier
from kvstore.store import StoreOptions, TieredStore
from kvstore.tiers.base import PagesStored, TierChange
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.device_copies import OpenCopies, StreamCopies, open_copies
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from tests.samples.pages import LAYOUT, chain, page_data

PROMPTS = [chain(6), chain(3, salt="a"), chain(8, first_token=700), chain(2, first_token=900)]
ALL_PAGES = sum(map(len, PROMPTS))
DEVICE_PAGES, HOST_PAGES = 16, 6  # a prompt of 8 fits into half of the device, as much as may wait to be spilled
PROMPT = st.sampled_from(PROMPTS)


class StoreModel(RuleBasedStateMachine):
    """Every rule does to the store what an engine does. The disk has room for everything."""

    copies: ClassVar[OpenCopies] = staticmethod(open_copies)

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.computed: set[PageKey] = set()  # ever, and written through since storage was last cleared
        self.open()

    def open(self) -> None:
        self.told: dict[tuple[Tier, PageKey], PageMeta] = {}
        self.device = DeviceTier(LAYOUT, pages=DEVICE_PAGES, copies=self.copies)
        disk = DiskTier(LAYOUT, Path(self.folder.name), capacity_bytes=ALL_PAGES * LAYOUT.page_bytes)
        host = HostTier(LAYOUT, capacity_bytes=HOST_PAGES * LAYOUT.page_bytes)
        options = StoreOptions(window_bytes=3 * LAYOUT.page_bytes, fetch_s=Allowance(60.0))
        self.store = TieredStore(self.device, [host, disk], options=options, on_change=self.hear)
        self.store.announce()

    def hear(self, change: TierChange) -> None:
        if isinstance(change, PagesStored):
            self.told.update({(change.tier, key): meta for key, meta in change.pages})
        else:
            for key in change.keys:
                self.told.pop((change.tier, key), None)

    @rule(prompt=PROMPT)
    def run_a_prompt(self, prompt: list[tuple[PageKey, PageMeta]]) -> None:
        keys = [key for key, _ in prompt]
        slots = self.device.acquire(keys)
        fresh = self.device.allocate(len(keys) - len(slots))
        assert fresh is not None
        tiers = self.store.fetch(keys[len(slots) :], fresh).result(60)
        hits = len(slots) + len(tiers)
        slots += fresh
        for slot, key in zip(slots[:hits], keys, strict=False):
            assert self.device.kv[slot].numpy().tobytes() == page_data(key)
        # What was written through is on disk for good, so the hits reach to the first page that never was.
        assert hits == next((i for i, key in enumerate(keys) if key not in self.computed), len(keys))
        assert self.device.copy_in(slots[hits:], [memoryview(page_data(key)) for key in keys[hits:]])
        for slot, (key, meta) in zip(slots[-len(fresh) :] if fresh else [], prompt[-len(fresh) :], strict=False):
            assert self.device.publish(slot, key, meta)
        self.store.spill(slots)
        self.device.release(slots)
        assert self.store.flush(60)
        self.computed.update(keys)

    @rule()
    def flush_caches(self) -> None:
        self.store.clear()

    @rule()
    def forget_everything(self) -> None:
        self.store.clear(storage=True)
        self.computed.clear()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def agree(self) -> None:
        self.store.check()
        held = {(tier.tier, key): meta for tier in (self.device, *self.store.lower) for key, meta in tier.scan()}
        assert held == self.told
        assert {key for tier, key in held if tier is Tier.DISK} == self.computed
        assert all(not stats.alarms for stats in self.store.stats().values())

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


class StreamedStoreModel(StoreModel):
    """Over a device that is reached as a GPU is, on CPU tensors."""

    copies = StreamCopies


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestStreamedStoreModel = StreamedStoreModel.TestCase
TestStreamedStoreModel.settings = settings(max_examples=10, stateful_step_count=15, deadline=None)
