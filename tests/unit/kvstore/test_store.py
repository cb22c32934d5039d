"""The tiered store: what it fetches, what it writes through, and what it never waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.deadline import Allowance
from kvstore.page import Namespace, PageKey, PageMeta, Tier
from kvstore.store import StoreOptions, TieredStore
from kvstore.tiers.base import NewPage, PagesStored, TierChange
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.device_copies import StreamCopies, open_copies
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import FillRows, HostTier
from kvstore.tiers.slotted import Fault
from tests.samples.gated_tier import GatedTier
from tests.samples.pages import LAYOUT, chain, page, page_data, strangers

PAGE = LAYOUT.page_bytes
TWO_PAGE_WINDOWS = StoreOptions(window_bytes=2 * PAGE, fetch_s=Allowance(60.0))


class BrokenTier(GatedTier):
    """A tier with a bug."""

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        raise RuntimeError("a bug")


@dataclass
class Setup:
    device: DeviceTier
    host: HostTier
    disk: DiskTier
    store: TieredStore
    changes: list[TierChange] = field(default_factory=list)


@pytest.fixture(params=[open_copies, StreamCopies], ids=["by the processor", "by streams"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    device = DeviceTier(LAYOUT, pages=32, copies=request.param)
    host = HostTier(LAYOUT, capacity_bytes=16 * PAGE)
    disk = DiskTier(LAYOUT, tmp_path / "disk", capacity_bytes=64 * PAGE)
    changes: list[TierChange] = []
    store = TieredStore(device, [host, disk], options=TWO_PAGE_WINDOWS, on_change=changes.append)
    yield Setup(device, host, disk, store, changes)
    store.close()
    store.close()


def keys_of(pages: Sequence[tuple[PageKey, PageMeta]]) -> list[PageKey]:
    return [key for key, _ in pages]


def compute(device: DeviceTier, pages: Sequence[tuple[PageKey, PageMeta]]) -> list[int]:
    """Do what an engine does: take slots, write into them, publish."""
    slots = device.allocate(len(pages))
    assert slots is not None
    assert device.copy_in(slots, [memoryview(page_data(key)) for key in keys_of(pages)])
    assert all(device.publish_all([(slot, key, meta) for slot, (key, meta) in zip(slots, pages, strict=True)]))
    return slots


def content(device: DeviceTier, slots: Sequence[int]) -> list[bytes]:
    return [device.kv[slot].numpy().tobytes() for slot in slots]


def test_a_prefix_is_fetched_from_wherever_each_page_is(setup: Setup) -> None:
    pages = chain(7)
    setup.host.put([page(entry) for entry in pages[:3]])
    setup.disk.put([page(entry) for entry in pages[1:6]])
    slots = setup.device.allocate(7)
    tiers = setup.store.fetch(keys_of(pages), slots).result()
    assert tiers == [Tier.HOST] * 3 + [Tier.DISK] * 3
    assert content(setup.device, slots[:6]) == [page_data(key) for key in keys_of(pages[:6])]
    assert setup.device.exists(keys_of(pages)) == [False] * 7  # publishing is the engine's


def test_pages_that_came_from_disk_are_promoted(setup: Setup) -> None:
    pages = chain(5)
    setup.disk.put([page(entry) for entry in pages])
    slots = setup.device.allocate(5)
    assert setup.store.fetch(keys_of(pages), slots).result() == [Tier.DISK] * 5
    setup.store.close()  # promotion follows the answer
    assert dict(setup.host.scan()) == dict(pages)


def test_nothing_is_fetched_beyond_the_first_gap(setup: Setup) -> None:
    pages = chain(6)
    setup.host.put([page(entry) for i, entry in enumerate(pages) if i != 3])
    slots = setup.device.allocate(6)
    assert setup.store.fetch(keys_of(pages), slots).result() == [Tier.HOST] * 3
    assert setup.store.fetch(keys_of(strangers(2, first_token=900)), slots[:2]).result() == []
    assert setup.store.fetch([], []).result() == []


def test_a_bad_page_ends_the_prefix(setup: Setup) -> None:
    pages = chain(5)
    setup.host.put([page(entry) for entry in pages])
    setup.host._rows[[row.tobytes() for row in setup.host._rows].index(page_data(pages[2][0])), 7] ^= 1
    slots = setup.device.allocate(5)
    assert setup.store.fetch(keys_of(pages), slots).result() == [Tier.HOST] * 2
    assert setup.store.stats()[Tier.HOST].alarms == {"checksum": 1}


def test_published_pages_are_written_through_to_every_tier(setup: Setup) -> None:
    pages = chain(5)
    slots = compute(setup.device, pages)
    setup.store.spill(slots)
    setup.device.release(slots)
    assert setup.store.flush(60)
    assert setup.host.exists(keys_of(pages)) == setup.disk.exists(keys_of(pages)) == [True] * 5
    assert setup.device.evictable_pages == 5  # no pin is left
    told = [(change.tier, key) for change in setup.changes for key, _ in change.pages]
    assert sorted(told) == sorted((tier, key) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK) for key in keys_of(pages))
    setup.store.spill(setup.device.acquire(keys_of(pages)))
    assert setup.store.flush(60)
    assert (setup.host.stats().puts, setup.disk.stats().puts) == (5, 5)


def test_what_was_written_through_comes_back_after_the_device_let_go(setup: Setup) -> None:
    pages = chain(8, salt="tenant")
    slots = compute(setup.device, pages)
    setup.store.spill(slots)
    assert setup.store.flush(60)
    setup.device.release(slots)
    setup.store.clear()
    assert setup.store.stats()[Tier.HOST].used_bytes == 0
    fresh = setup.device.allocate(8)
    setup.device.kv.fill_(0)
    assert setup.store.fetch(keys_of(pages), fresh).result() == [Tier.DISK] * 8
    assert content(setup.device, fresh) == [page_data(key) for key in keys_of(pages)]


def test_clearing_storage_too_leaves_nothing(setup: Setup) -> None:
    pages = chain(3)
    setup.disk.put([page(entry) for entry in pages])
    setup.store.clear()
    assert setup.disk.exists(keys_of(pages)) == [True] * 3
    setup.store.clear(storage=True)
    assert setup.disk.exists(keys_of(pages)) == [False] * 3


def test_a_restarted_store_announces_what_its_disk_holds(tmp_path: Path) -> None:
    pages = chain(4)
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=8 * PAGE)
    disk.put([page(entry) for entry in pages])
    disk.close()
    changes: list[TierChange] = []
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=8 * PAGE)
    store = TieredStore(DeviceTier(LAYOUT, pages=8), [disk], on_change=changes.append)
    assert changes == []
    store.announce()
    assert changes == [PagesStored(Tier.DISK, tuple(pages))]
    store.close()


def test_a_tier_that_hangs_costs_one_deadline_and_writes_nothing_afterwards() -> None:
    pages = chain(4)
    device, slow = DeviceTier(LAYOUT, pages=8), GatedTier()
    slow.gate.set()
    slow.put([page(entry) for entry in pages])
    slow.gate.clear()
    store = TieredStore(
        device, [slow], options=StoreOptions(fetch_s=Allowance(0.05), window_bytes=2 * PAGE, fetch_threads=1)
    )
    slots = device.allocate(4)
    first = store.fetch(keys_of(pages), slots)
    behind = store.fetch(keys_of(pages), slots)  # its thread is busy hanging
    assert (first.result(60), behind.result(60)) == ([], [])
    slow.gate.set()
    store.close()  # waits for the thread that hung
    assert slow.stats().hits == 2
    assert content(device, slots) == [bytes(PAGE)] * 4


def test_what_was_filled_before_the_end_is_kept() -> None:
    pages = chain(4)
    device, host, slow = DeviceTier(LAYOUT, pages=8), HostTier(LAYOUT, capacity_bytes=8 * PAGE), GatedTier()
    host.put([page(entry) for entry in pages[:2]])
    slow.gate.set()
    slow.put([page(entry) for entry in pages[2:]])
    slow.gate.clear()
    store = TieredStore(device, [host, slow], options=TWO_PAGE_WINDOWS)
    slots = device.allocate(4)
    fetched = store.fetch(keys_of(pages), slots)
    slow.reading.acquire()
    closer = threading.Thread(target=store.close)
    closer.start()
    assert fetched.result(60) == [Tier.HOST] * 2
    assert content(device, slots[:2]) == [page_data(key) for key in keys_of(pages[:2])]
    slow.gate.set()
    closer.join()


def test_a_fetch_can_be_cancelled_only_while_it_waits() -> None:
    pages = chain(2)
    device, slow = DeviceTier(LAYOUT, pages=8), GatedTier()
    slow.gate.set()
    slow.put([page(entry) for entry in pages])
    slow.gate.clear()
    store = TieredStore(device, [slow], options=StoreOptions(fetch_s=Allowance(60.0), fetch_threads=1))
    running = store.fetch(keys_of(pages), device.allocate(2))
    slow.reading.acquire()
    waiting = store.fetch(keys_of(pages), device.allocate(2))
    assert waiting.cancel()
    assert not running.cancel()
    slow.gate.set()
    assert running.result(60) == [Tier.DISK] * 2
    store.close()


def test_spilling_faster_than_a_tier_writes_drops_the_last_pages_and_never_blocks() -> None:
    device, slow = DeviceTier(LAYOUT, pages=32), GatedTier()
    store = TieredStore(device, [slow], options=StoreOptions(window_bytes=PAGE, spill_queue_bytes=6 * PAGE))
    pages = chain(12)
    slots = compute(device, pages)
    store.spill(slots[:1])
    assert not store.flush(0.0)
    store.spill(slots[1:])
    dropped = store.stats()[Tier.DEVICE].dropped
    assert dropped in (5, 6)  # the first may have left the queue for the tier by then
    slow.gate.set()
    assert store.flush(60)
    assert slow.exists(keys_of(pages)) == [True] * (12 - dropped) + [False] * dropped
    device.release(slots)
    assert device.evictable_pages == 12
    store.close()


def test_a_namespace_forgotten_while_its_pages_are_spilled_does_not_come_back(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, store = setup.device, setup.store
    put, pages = store.below.put_in_place, chain(2, salt="mine")  # one window

    def forget_and_put(spilled: Sequence[NewPage], fill: FillRows) -> list[bool]:
        store.forget(Namespace("mine"))
        return put(spilled, fill)

    monkeypatch.setattr(store.below, "put_in_place", forget_and_put)
    slots = compute(device, pages)
    store.spill(slots)
    assert store.flush(60)
    assert store.below.exists(keys_of(pages)) == [False] * 2
    device.release(slots)


@pytest.mark.parametrize("storage", [False, True])
def test_pages_that_are_spilled_while_all_is_cleared_do_not_come_back(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, *, storage: bool
) -> None:
    device, store = setup.device, setup.store
    put, pages = store.below.put_in_place, chain(2)  # one window

    def clear_and_put(spilled: Sequence[NewPage], fill: FillRows) -> list[bool]:
        store.clear(storage=storage)
        return put(spilled, fill)

    monkeypatch.setattr(store.below, "put_in_place", clear_and_put)
    slots = compute(device, pages)
    store.spill(slots)
    assert store.flush(60)
    assert store.below.exists(keys_of(pages)) == [False] * 2
    device.release(slots)


def test_a_copy_out_with_a_bug_keeps_no_page_and_no_room(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = chain(3)
    slots = compute(setup.device, pages)

    def broken(slots: Sequence[int], out: Sequence[memoryview]) -> list[int | None]:
        raise ValueError("a bug")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(setup.device, "copy_out", broken)
        setup.store.spill(slots)
        assert setup.store.flush(60)
    assert [record.getMessage() for record in caplog.records] == ["a background task of the store failed"] * 2
    assert (setup.host.free_pages, setup.host.evictable_pages) == (16, 0)
    setup.store.spill(slots)
    assert setup.store.flush(60)
    assert setup.store.below.exists(keys_of(pages)) == [True] * 3
    setup.device.release(slots)
    assert setup.device.evictable_pages == 3


def test_closing_answers_what_waits(setup: Setup) -> None:
    device, slow = DeviceTier(LAYOUT, pages=8), GatedTier()
    slow.gate.set()
    slow.put([page(entry) for entry in chain(2)])
    slow.gate.clear()
    store = TieredStore(device, [slow], options=StoreOptions(fetch_s=Allowance(60.0)))
    waiting = store.fetch(keys_of(chain(2)), device.allocate(2))
    slow.reading.acquire()
    closer = threading.Thread(target=store.close)
    closer.start()
    assert waiting.result(60) == []
    slow.gate.set()
    closer.join()
    assert store.fetch(keys_of(chain(2)), device.allocate(2)).result() == []


def test_a_bug_in_a_tier_is_logged_and_answers_nothing(caplog: pytest.LogCaptureFixture) -> None:
    device, broken = DeviceTier(LAYOUT, pages=8), BrokenTier()
    broken.gate.set()
    broken.put([page(entry) for entry in chain(1)])
    store = TieredStore(device, [broken])
    with caplog.at_level(logging.ERROR):
        assert store.fetch(keys_of(chain(1)), device.allocate(1)).result(60) == []
        store.close()
    assert [record.getMessage() for record in caplog.records] == ["a background task of the store failed"]


def test_a_store_of_the_wrong_tiers_is_the_callers_error(setup: Setup) -> None:
    host = HostTier(LAYOUT, capacity_bytes=PAGE)
    with pytest.raises(ValueError, match="fast to slow"):
        TieredStore(setup.device, [setup.disk, host])
    with pytest.raises(ValueError, match="fast to slow"):
        TieredStore(setup.device, [host, host])
    with pytest.raises(ValueError, match="1 keys and 2 slots"):
        setup.store.fetch(keys_of(chain(1)), [0, 1])
