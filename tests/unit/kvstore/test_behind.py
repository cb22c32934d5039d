"""What is written behind a caller's back, what is kept from it, and what must not be written any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.deadline import Allowance
from kvstore.page import Namespace, PageKey, Tier
from kvstore.page_store import PageStore, PageStoreOptions, WritePolicy
from kvstore.tiers.base import Page
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from tests.samples.gated_tier import GatedTier
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data

PAGE = LAYOUT.page_bytes
BACK = PageStoreOptions(
    get_s=Allowance(60.0), window_bytes=2 * PAGE, write_policy=WritePolicy.BACK, back_bytes=4 * PAGE
)
THROUGH = replace(BACK, write_policy=WritePolicy.THROUGH)
PAGES = chain(6, salt="mine")
KEYS = [key for key, _ in PAGES]


@pytest.fixture
def gated() -> Iterator[GatedTier]:
    tier = GatedTier()
    yield tier
    tier.gate.set()


def opened(*below: HostTier | DiskTier, options: PageStoreOptions = BACK) -> PageStore:
    return PageStore([HostTier(LAYOUT, capacity_bytes=16 * PAGE), *below], options)


def put(store: PageStore, places: range) -> None:
    assert all(store.put([page(PAGES[place]) for place in places]))


def test_written_back_are_the_oldest_beyond_the_bound_and_all_on_closing(tmp_path: Path) -> None:
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)
    store = opened(disk)
    put(store, range(4))
    put(store, range(2))  # again: nothing new
    assert disk.exists(KEYS) == [False] * 6
    put(store, range(4, 6))
    assert store.locate(KEYS) == [Tier.HOST] * 6
    store.close()
    with_all = DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)
    assert [key for key, _ in with_all.scan()] == KEYS
    out = buffers(6)
    assert None not in with_all.get(KEYS, out)
    assert [bytes(buffer) for buffer in out] == [page_data(key) for key in KEYS]
    with_all.close()


def test_a_flush_writes_back_what_waits(gated: GatedTier) -> None:
    store = opened(gated)
    put(store, range(3))
    assert not store.flush(0.0)
    gated.gate.set()
    assert store.flush(60)
    assert gated.exists(KEYS) == [True] * 3 + [False] * 3
    store.close()


def test_a_run_that_ends_before_its_pages_are_written_costs_no_write(gated: GatedTier) -> None:
    gated.gate.set()
    store = opened(gated)
    put(store, range(3))
    store.retire(KEYS[1:3])
    assert store.spared == 2
    assert store.exists(KEYS[:3]) == [True] * 3
    assert store.flush(60)
    assert gated.exists(KEYS[:3]) == [True, False, False]
    store.check()
    store.close()


def test_what_waits_to_be_written_back_takes_at_most_half_of_the_host_tier(gated: GatedTier) -> None:
    gated.gate.set()
    store = PageStore([HostTier(LAYOUT, capacity_bytes=4 * PAGE), gated], BACK)
    put(store, range(3))
    assert store.wait_for_room(BACK.behind_bytes // PAGE, 60)
    assert gated.exists(KEYS[:3]) == [True, False, False]
    put(store, range(3, 4))
    assert store.flush(60)
    assert gated.exists(KEYS[:4]) == [True] * 4
    store.close()


@pytest.mark.parametrize("options", [THROUGH, BACK], ids=["through", "back"])
def test_a_page_forgotten_while_it_waits_is_not_written(gated: GatedTier, options: PageStoreOptions) -> None:
    other, may_go_on = chain(1, salt="other")[0], threading.Event()

    def wait(pages: list[Page], put_s: float) -> list[Page]:
        may_go_on.wait()
        return pages

    gated.gate.set()
    tiers = [HostTier(LAYOUT, capacity_bytes=16 * PAGE), gated]
    store = PageStore(tiers, replace(options, window_bytes=PAGE), complete=wait)
    assert all(store.put([page(other)]))
    put(store, range(3))
    assert store.forget(Namespace("mine")) == 3
    may_go_on.set()
    assert store.flush(60)
    assert [key for key, _ in gated.scan()] == [other[0]]
    assert store.exists(KEYS[:3]) == [False] * 3
    store.check()
    store.close()


class ForgettingTier(GatedTier):
    """A disk on which a namespace is forgotten at the moment at which its pages have been written, or read."""

    store: PageStore

    def put(self, pages: Sequence[Page]) -> list[bool]:
        done = super().put(pages)
        self._forget_all()
        return done

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[object]:  # type: ignore[override]
        found = super().get(keys, out)
        self._forget_all()
        return list(found)

    def _forget_all(self) -> None:
        thread = threading.Thread(target=self.store.forget, args=(Namespace("mine"),))
        thread.start()
        thread.join()


def test_a_page_forgotten_while_it_is_written_does_not_come_back() -> None:
    disk = ForgettingTier()
    disk.gate.set()
    store = disk.store = opened(disk, options=THROUGH)
    put(store, range(3))
    assert store.flush(60)
    assert store.exists(KEYS) == [False] * 6
    store.close()


def test_a_page_forgotten_while_it_is_read_is_not_promoted() -> None:
    disk = ForgettingTier()
    disk.gate.set()
    GatedTier.put(disk, [page(entry) for entry in PAGES])
    store = disk.store = opened(disk, options=THROUGH)
    store.get(KEYS, buffers(6))
    assert store.exists(KEYS) == [False] * 6
    store.close()


def test_pages_are_promoted_ahead_of_their_use(gated: GatedTier) -> None:
    gated.gate.set()
    gated.put([page(entry) for entry in PAGES[:4]])
    store = opened(gated, options=THROUGH)
    put(store, range(1))
    assert store.promote(KEYS).result(60) == [None, Tier.DISK, Tier.DISK, Tier.DISK, None, None]
    assert store.locate(KEYS) == [Tier.HOST] * 4 + [None] * 2
    out = buffers(4)
    assert store.get(KEYS[:4], out) == [Tier.HOST] * 4
    assert [bytes(buffer) for buffer in out] == [page_data(key) for key in KEYS[:4]]
    store.close()
    assert PageStore([]).promote(KEYS).result(60) == [None] * 6
