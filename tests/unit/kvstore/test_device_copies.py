"""Pages on their way from and to a device that computes behind its callers' backs.

There is no GPU here. What needs none runs as it is: batches, staging, locking and errors on CPU tensors, over torch's
own streams for the CPU. ``LazyDevice`` stands for a GPU where the order of things is asked, and a namespace with CUDA's
two functions for page-locking them. What stands in for nothing is in ``tests/integration/test_cuda_device.py``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvstore.codec import checksum
from kvstore.deadline import Allowance
from kvstore.memory import ByteRows, page_rows
from kvstore.page import PageKey, PageMeta, Tier
from kvstore.store import StoreOptions, TieredStore
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.device_copies import DirectCopies, PageCopies, StreamCopies, open_copies
from kvstore.tiers.device_streams import lock_pages
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from tests.samples.lazy_device import LazyDevice
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data

PAGE = LAYOUT.page_bytes
OLD, NEW = b"\x11" * PAGE, b"\x22" * PAGE
OPTIONS = StoreOptions(window_bytes=4 * PAGE, fetch_s=Allowance(60.0))


@dataclass
class Setup:
    """A store whose device is lazy."""

    lazy: LazyDevice
    device: DeviceTier
    host: HostTier
    disk: DiskTier
    store: TieredStore

    def compute(self, slots: Sequence[int], pages: Sequence[tuple[PageKey, PageMeta]]) -> None:
        """Give the engine's stream what fills these slots."""
        for slot, (key, _) in zip(slots, pages, strict=True):
            self.lazy.engine.give(partial(put_in, self.device, slot, page_data(key)))

    def publish(self, pages: Sequence[tuple[PageKey, PageMeta]]) -> list[int]:
        """Do what an engine does: take slots, let the device fill them some time, publish."""
        slots = self.device.allocate(len(pages))
        assert slots is not None
        self.compute(slots, pages)
        assert all(self.device.publish_all([(slot, *entry) for slot, entry in zip(slots, pages, strict=True)]))
        return slots


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    lazy = LazyDevice()
    device = DeviceTier(LAYOUT, pages=8, copies=partial(StreamCopies, open_stream=lazy.open_stream))
    host = HostTier(LAYOUT, capacity_bytes=16 * PAGE)
    disk = DiskTier(LAYOUT, tmp_path / "disk", capacity_bytes=64 * PAGE)
    store = TieredStore(device, [host, disk], options=OPTIONS)
    lazy.log.clear()
    yield Setup(lazy, device, host, disk, store)
    lazy.gate.set()
    store.check()
    store.close()


def put_in(device: DeviceTier, slot: int, data: bytes) -> None:
    device.kv[slot].view(torch.uint8).view(-1).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def content(device: DeviceTier, slot: int) -> bytes:
    return device.kv[slot].numpy().tobytes()


def keys_of(pages: Sequence[tuple[PageKey, PageMeta]]) -> list[PageKey]:
    return [key for key, _ in pages]


# --- the same bytes, whichever way ---


@pytest.mark.parametrize("way", [DirectCopies, StreamCopies])
def test_pages_go_out_and_come_in(way: Callable[[torch.Tensor], PageCopies]) -> None:
    pages = torch.zeros((6, PAGE), dtype=torch.uint8)
    copies = way(pages)
    data = [page_data(key) for key, _ in chain(3)]
    assert copies.write([4, 0, 2], [memoryview(data[0]), memoryview(bytearray(data[1])), memoryview(data[2])])
    empty = bytes(PAGE)
    assert [row.tobytes() for row in pages.numpy()] == [data[1], empty, data[2], empty, data[0], empty]
    out = buffers(3)
    assert copies.read([2, 4, 0], out) == [checksum(data[2]), checksum(data[0]), checksum(data[1])]
    assert [bytes(buffer) for buffer in out] == [data[2], data[0], data[1]]
    copies.close()
    copies.close()


def test_the_processors_own_memory_needs_no_streams() -> None:
    assert isinstance(open_copies(torch.zeros((1, PAGE), dtype=torch.uint8)), DirectCopies)


# --- order, on a device that puts off whatever it may ---


def test_the_stand_in_tells_what_was_not_put_in_order() -> None:
    lazy, pages = LazyDevice(), torch.zeros((1, 8), dtype=torch.uint8)
    copies = StreamCopies(pages, open_stream=lazy.open_stream)
    lazy.engine.give(lambda: pages.fill_(7))
    out = memoryview(bytearray(8))
    copies.read([0], [out])
    assert bytes(out) == bytes(8)  # read before it was computed
    copies.order_reads()
    copies.read([0], [out])
    assert bytes(out) == bytes([7]) * 8


def test_a_page_is_read_only_after_what_its_publisher_had_given_the_device(setup: Setup) -> None:
    pages = chain(3)
    slots = setup.publish(pages)
    assert content(setup.device, slots[0]) == bytes(PAGE)  # not computed yet
    setup.store.spill(slots)
    assert setup.store.flush(60)
    out = buffers(3)
    assert all(setup.host.get(keys_of(pages), out))
    assert [bytes(buffer) for buffer in out] == [page_data(key) for key in keys_of(pages)]
    setup.device.release(slots)
    assert setup.device.stats().alarms == {}


def test_a_slot_is_written_only_after_what_its_last_owner_had_given_the_device(setup: Setup) -> None:
    device, seen = setup.device, list[bytes]()
    slots = device.allocate(8)
    assert slots is not None
    for slot in slots:
        put_in(device, slot, OLD)
        setup.lazy.engine.give(lambda slot=slot: seen.append(content(device, slot)))  # a step that reads it
    device.release(slots)
    taken = device.allocate(8)
    assert taken is not None
    assert device.copy_in(taken, [memoryview(NEW)] * 8)
    assert seen == [OLD] * 8
    assert [content(device, slot) for slot in taken] == [NEW] * 8


def test_a_fetch_comes_after_what_its_caller_did_with_the_slots(setup: Setup) -> None:
    pages = chain(2)
    setup.host.put([page(entry) for entry in pages])
    slots = setup.device.allocate(2)
    assert slots is not None
    for slot in slots:
        setup.lazy.engine.give(partial(put_in, setup.device, slot, bytes(PAGE)))  # blanked first
    assert setup.store.fetch(keys_of(pages), slots).result(60) == [Tier.HOST] * 2
    setup.lazy.engine.wait()  # at the latest
    assert [content(setup.device, slot) for slot in slots] == [page_data(key) for key in keys_of(pages)]


def test_the_pages_of_a_batch_are_waited_for_once(setup: Setup) -> None:
    pages = chain(4)
    slots = setup.publish(pages)
    setup.store.spill(slots)
    assert setup.store.flush(60)
    out = [line for line in setup.lazy.log if line.startswith("out")]
    assert out == ["out follows engine"] + ["out is given a copy"] * 4 + ["out copies"] * 4 + ["out is over"]
    setup.device.release(slots)
    setup.device.clear()
    fresh = setup.device.allocate(4)
    assert fresh is not None
    setup.lazy.log.clear()
    assert setup.store.fetch(keys_of(pages), fresh).result(60) == [Tier.HOST] * 4
    assert setup.lazy.log == (["in follows engine"] + ["in is given a copy"] * 4 + ["in copies"] * 4 + ["in is over"])


def test_a_slot_keeps_its_page_while_that_is_copied(setup: Setup) -> None:
    pages = chain(8)
    slots = setup.publish(pages)
    setup.lazy.gate.clear()
    setup.store.spill(slots)
    setup.device.release(slots)
    setup.lazy.is_waited_for.wait(60)  # copies are under way
    assert setup.device.allocate(8) is None
    setup.lazy.gate.set()
    assert setup.store.flush(60)
    assert setup.host.exists(keys_of(pages)) == [True] * 4 + [False] * 4  # as many as may wait to be spilled
    assert setup.device.allocate(8) is not None


def test_a_page_that_host_and_disk_have_is_copied_no_more(setup: Setup) -> None:
    pages = chain(3)
    setup.disk.put([page(entry) for entry in pages])
    setup.host.put([page(entry) for entry in pages[:2]])
    slots = setup.publish(pages)
    setup.store.spill(slots)
    assert setup.store.flush(60)
    assert setup.lazy.log.count("out copies") == 1
    assert setup.host.exists(keys_of(pages)) == [True] * 3
    setup.device.release(slots)


def test_without_a_host_tier_pages_go_through_the_stores_own_memory(tmp_path: Path) -> None:
    lazy, pages = LazyDevice(), chain(4)
    device = DeviceTier(LAYOUT, pages=8, copies=partial(StreamCopies, open_stream=lazy.open_stream))
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=8 * PAGE)
    store = TieredStore(device, [disk], options=OPTIONS)
    setup = Setup(lazy, device, HostTier(LAYOUT, capacity_bytes=PAGE), disk, store)
    slots = setup.publish(pages)
    store.spill(slots)
    assert store.flush(60)
    device.release(slots)
    device.clear()
    fresh = device.allocate(4)
    assert fresh is not None
    assert store.fetch(keys_of(pages), fresh).result(60) == [Tier.DISK] * 4
    assert [content(device, slot) for slot in fresh] == [page_data(key) for key in keys_of(pages)]
    store.close()


# --- a device that fails ---


def test_a_copy_out_that_fails_is_a_dropped_write_and_an_alarm(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    pages = chain(4)
    slots = setup.publish(pages)
    setup.lazy.faults = {"copy"}
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            setup.store.spill(slots)
            assert setup.store.flush(60)
    assert setup.store.below.exists(keys_of(pages)) == [False] * 4
    assert setup.device.stats().alarms == {"copy": 8}
    assert setup.host.stats().dropped == 8
    assert [record.getMessage() for record in caplog.records] == [
        "pages cannot be copied from or to cpu: CUDA error: copy failed"  # once
    ]
    setup.lazy.faults.clear()
    setup.store.spill(slots)
    assert setup.store.flush(60)
    assert setup.host.exists(keys_of(pages)) == [True] * 4
    setup.device.release(slots)


@pytest.mark.parametrize("source", [Tier.HOST, Tier.DISK])
def test_a_copy_in_that_fails_is_a_miss_and_an_alarm(setup: Setup, source: Tier) -> None:
    pages = chain(4)
    (setup.host if source is Tier.HOST else setup.disk).put([page(entry) for entry in pages])
    slots = setup.device.allocate(4)
    assert slots is not None
    setup.lazy.faults = {"copy"}
    assert setup.store.fetch(keys_of(pages), slots).result(60) == []
    assert setup.device.stats().alarms == {"copy": 4}
    setup.lazy.faults.clear()
    assert setup.store.fetch(keys_of(pages), slots).result(60) in ([Tier.HOST] * 4, [source] * 4)
    assert [content(setup.device, slot) for slot in slots] == [page_data(key) for key in keys_of(pages)]


def test_a_read_of_the_tier_itself_that_fails_is_a_miss(setup: Setup) -> None:
    (entry,) = chain(1)
    setup.device.release(setup.publish([entry]))
    setup.lazy.faults = {"copy"}
    assert setup.device.get([entry[0]], buffers(1)) == [None]
    assert setup.device.put([page(entry) for entry in chain(1, first_token=50)]) == [False]
    stats = setup.device.stats()
    assert (stats.misses, stats.alarms, stats.dropped) == ({"unavailable": 1}, {"copy": 2}, 1)
    setup.lazy.faults.clear()
    assert setup.device.get([entry[0]], buffers(1)) != [None]


@pytest.mark.parametrize("fault", ["follow", "wait"])
def test_a_device_that_keeps_no_order_is_copied_from_and_to_no_more(setup: Setup, fault: str) -> None:
    pages = chain(2)
    setup.host.put([page(entry) for entry in chain(2, first_token=90)])
    setup.lazy.faults = {fault}
    slots = setup.publish(pages)
    setup.store.spill(slots)
    assert setup.store.flush(60)
    setup.lazy.faults.clear()  # too late: nobody knows what is under way
    setup.store.spill(slots)
    assert setup.store.flush(60)
    setup.device.release(slots)
    fresh = setup.device.allocate(2)
    assert fresh is not None
    assert setup.store.fetch(keys_of(chain(2, first_token=90)), fresh).result(60) == []
    setup.device.release(fresh)
    assert setup.store.below.exists(keys_of(pages)) == [False] * 2
    assert setup.device.stats().alarms == {"copy": 6}


def test_a_page_that_is_not_what_it_was_is_not_given_away(setup: Setup) -> None:
    ((key, meta),) = chain(1)
    slots = setup.publish([(key, meta)])
    assert setup.device.copy_out(slots, buffers(1)) == [checksum(page_data(key))]
    setup.device.kv[slots[0]].view(torch.uint8).view(-1)[5] ^= 1
    setup.store.spill(slots)
    assert setup.store.flush(60)
    assert setup.store.below.exists([key]) == [False]
    assert setup.device.stats().alarms == {"checksum": 1}
    setup.device.release(slots)


# --- page-locked memory ---


@pytest.mark.parametrize("is_granted", [True, False])
def test_the_stores_memory_is_locked_as_long_as_it_is_used(is_granted: bool, tmp_path: Path) -> None:
    held: dict[int, int] = {}  # bytes by address

    def lock(rows: ByteRows, device: torch.device) -> Callable[[], object] | None:
        if not is_granted:
            return None
        held[rows.ctypes.data] = rows.nbytes
        return lambda: held.pop(rows.ctypes.data)

    device = DeviceTier(LAYOUT, pages=8, copies=partial(StreamCopies, lock_pages=lock))
    host = HostTier(LAYOUT, capacity_bytes=16 * PAGE)
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=16 * PAGE)
    store = TieredStore(device, [host, disk], options=OPTIONS)
    window = OPTIONS.window_bytes
    assert sorted(held.values()) == (
        [window] * 3 + [16 * PAGE] if is_granted else []
    )  # spilling, two threads that read, the tier
    pages = chain(2)
    slots = device.allocate(2)
    assert slots is not None
    assert device.copy_in(slots, [memoryview(page_data(key)) for key in keys_of(pages)])
    device.publish_all([(slot, *entry) for slot, entry in zip(slots, pages, strict=True)])
    store.spill(slots)
    assert store.flush(60)
    assert host.exists(keys_of(pages)) == [True] * 2
    device.release(slots)
    store.close()
    assert held == {}


class Cudart:
    """Stands for CUDA's runtime, of which there is none here."""

    def __init__(self, code: int) -> None:
        self.code, self.calls, self.threads = code, list[tuple[object, ...]](), set[threading.Thread]()

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self.calls.append(("register", address, length, flags))
        self.threads.add(threading.current_thread())
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        self.threads.add(threading.current_thread())
        return 0


@pytest.fixture
def cudart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart(request.param)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: cudart, device=lambda _: nullcontext()))
    return cudart


@pytest.mark.parametrize("cudart", [0], indirect=True)
def test_memory_is_locked_with_cuda_and_unlocked(cudart: Cudart) -> None:
    rows = page_rows(4, PAGE)
    unlock = lock_pages(rows, torch.device("cuda"))
    assert unlock is not None
    unlock()
    address = rows.ctypes.data
    assert cudart.calls == [("register", address, 4 * PAGE, 1), ("unregister", address)]
    assert threading.current_thread() not in cudart.threads  # or its next kernel would raise a refusal


@pytest.mark.parametrize("cudart", [2], indirect=True)
def test_memory_that_cuda_does_not_lock_stays_as_it_is(cudart: Cudart, caplog: pytest.LogCaptureFixture) -> None:
    assert lock_pages(page_rows(4, PAGE), torch.device("cuda")) is None
    assert lock_pages(np.zeros((0, PAGE), np.uint8), torch.device("cuda")) is None
    assert lock_pages(page_rows(1, PAGE), torch.device("cpu")) is None
    assert [record.getMessage() for record in caplog.records] == [
        "16384 bytes of host memory stay pageable: CUDA error 2 when locking them"
    ]
    assert len(cudart.calls) == 1
