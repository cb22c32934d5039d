"""The device tier on a real GPU: streams that overlap, memory that the GPU reads by itself, and a whole engine.

Where there is no GPU nothing of this is run; ``tests/unit/kvstore/test_device_copies.py`` says what is run instead.
On a machine that has one: ``./test -m gpu``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvstore.deadline import Allowance
from kvstore.page import PageKey, PageMeta, Tier
from kvstore.store import StoreOptions, TieredStore
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.device_streams import lock_pages
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from tests.samples.engines import ask, assert_nothing_held, load_tiny_model, make_engine, make_tiny_model, run
from tests.samples.pages import LAYOUT, buffers, chain, page_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NEEDS A GPU: torch finds no CUDA device; where there is one, `./test -m gpu` runs these",
    ),
]

PAGE = LAYOUT.page_bytes
LONG_CYCLES = 200_000_000  # a tenth of a second or more: the GPU is busy for longer than the processor needs to go on
OPTIONS = StoreOptions(window_bytes=4 * PAGE, fetch_s=Allowance(60.0))


@pytest.fixture
def device() -> Iterator[DeviceTier]:
    tier = DeviceTier(LAYOUT, pages=8, device="cuda")
    yield tier
    tier.check()
    tier.close()


def on_gpu(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()


def flat(device: DeviceTier, slot: int) -> torch.Tensor:
    return device.kv[slot].view(torch.uint8).view(-1)


def content(device: DeviceTier, slot: int) -> bytes:
    return bytes(flat(device, slot).cpu().numpy())


def keys_of(pages: Sequence[tuple[PageKey, PageMeta]]) -> list[PageKey]:
    return [key for key, _ in pages]


def test_a_page_is_read_after_the_kernels_of_its_publishers_stream(device: DeviceTier) -> None:
    pages = chain(4)
    data = [on_gpu(page_data(key)) for key in keys_of(pages)]
    slots = device.allocate(4)
    assert slots is not None
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG_CYCLES)
        for slot, one in zip(slots, data, strict=True):
            flat(device, slot).copy_(one)
        device.publish_all([(slot, *entry) for slot, entry in zip(slots, pages, strict=True)])
    out = buffers(4)
    assert None not in device.copy_out(slots, out)
    assert [bytes(buffer) for buffer in out] == [page_data(key) for key in keys_of(pages)]
    device.release(slots)


def test_a_slot_is_written_after_the_kernels_of_its_last_owners_stream(device: DeviceTier) -> None:
    slots = device.allocate(8)
    assert slots is not None
    assert device.copy_in(slots, [memoryview(b"\x11" * PAGE)] * 8)
    seen = torch.empty((8, PAGE), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG_CYCLES)
        for place, slot in enumerate(slots):
            seen[place].copy_(flat(device, slot))
        device.release(slots)
    taken = device.allocate(8)
    assert taken is not None
    assert device.copy_in(taken, [memoryview(b"\x22" * PAGE)] * 8)
    torch.cuda.synchronize()
    assert bool((seen == 0x11).all())
    assert {content(device, slot) for slot in taken} == {b"\x22" * PAGE}
    device.release(taken)


def test_pages_come_back_from_host_and_disk_through_locked_memory(device: DeviceTier, tmp_path: Path) -> None:
    pages = chain(6)
    host = HostTier(LAYOUT, capacity_bytes=16 * PAGE)
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=32 * PAGE)
    store = TieredStore(device, [host, disk], options=OPTIONS)
    assert torch.from_numpy(host.memory).is_pinned()
    for source in (Tier.HOST, Tier.DISK):
        slots = device.allocate(6)
        assert slots is not None
        for slot, key in zip(slots, keys_of(pages), strict=True):
            flat(device, slot).copy_(on_gpu(page_data(key)))
        device.publish_all([(slot, *entry) for slot, entry in zip(slots, pages, strict=True)])
        for start in (0, 4):  # no more than half of the device may wait to be spilled
            store.spill(slots[start : start + 4])
            assert store.flush(60)
        device.release(slots)
        device.clear()
        if source is Tier.DISK:
            host.clear()
        fresh = device.allocate(6)
        assert fresh is not None
        assert store.fetch(keys_of(pages), fresh).result(60) == [source] * 6
        assert [content(device, slot) for slot in fresh] == [page_data(key) for key in keys_of(pages)]
        device.release(fresh)
    assert all(not stats.alarms for stats in store.stats().values())
    store.close()
    assert not torch.from_numpy(host.memory).is_pinned()


def test_memory_that_cannot_be_locked_disturbs_no_kernel(caplog: pytest.LogCaptureFixture) -> None:
    host = HostTier(LAYOUT, capacity_bytes=16 * PAGE)
    unlock = lock_pages(host.memory, torch.device("cuda"))
    assert unlock is not None
    with caplog.at_level(logging.WARNING):
        assert lock_pages(host.memory, torch.device("cuda")) is None  # it is locked already
    assert "stay pageable" in caplog.text
    assert float(torch.ones(8, device="cuda").sum()) == 8.0
    unlock()


def test_answers_are_those_of_the_processor_whatever_was_cached(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    tokens = [(7 * place) % 150 for place in range(61)]
    expected = ask(plain := make_engine(load_tiny_model(tmp_path), pages=60), "cpu", tokens)
    run(plain, expected)
    model = load_tiny_model(tmp_path, "cuda")
    host = HostTier(model.page_layout("tiny", 4), capacity_bytes=4 << 20)
    engine = make_engine(model, pages=60, lower=[host])
    for name, hits in (("cold", (0, 0, 0, 0)), ("device", (60, 0, 0, 0)), ("host", (0, 60, 0, 0))):
        if name == "host":
            engine.store.device.clear()
        answer = ask(engine, name, tokens)
        run(engine, answer)
        assert engine.store.flush(60)
        assert (answer.tokens, answer.hit_tokens) == (expected.tokens, hits)
    seeded = [ask(engine, f"{number}", tokens, temperature=0.8, seed=5) for number in range(2)]
    run(engine, *seeded)
    assert seeded[0].tokens == seeded[1].tokens
    assert_nothing_held(engine)
    engine.store.close()
