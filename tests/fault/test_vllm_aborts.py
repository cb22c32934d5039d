"""A request of vLLM's that is aborted at whichever of its steps: its blocks are another's, and nothing of it stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvstore.deadline import Allowance
from kvstore.page import PageLayout, Tier
from kvstore.tiers.base import PageTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.slotted import Fault
from tests.samples.paged_engine import BLOCK, PAGE_BYTES, PagedEngine, Request

PROMPT = list(range(1000, 1000 + 10 * BLOCK + 3))
OTHER = list(range(7000, 7000 + 10 * BLOCK + 3))
STEPS = ("came", "was offered pages", "has blocks", "is loading", "is loading too long", "has its pages", "computes")


class GatedDisk(HostTier):
    """Stands for a disk whose reads begin, and end when the gate opens."""

    tier = Tier.DISK
    gate: threading.Event
    reading: threading.Event

    def _read(self, wanted: Sequence[tuple[int, memoryview]]) -> list[int | Fault]:
        self.reading.set()
        self.gate.wait()
        return super()._read(wanted)


@dataclass
class Bench:
    """An engine whose disk has the prompt, and whose memory has not."""

    engine: PagedEngine
    disk: GatedDisk


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(step: str) -> Iterator[Bench]:
    made: list[GatedDisk] = []

    def tiers(layout: PageLayout) -> list[PageTier]:
        disk = GatedDisk(layout, capacity_bytes=64 * PAGE_BYTES)
        disk.gate, disk.reading = threading.Event(), threading.Event()
        made.append(disk)
        return [HostTier(layout, capacity_bytes=16 * PAGE_BYTES), disk]

    engine = PagedEngine(tiers, load_s=Allowance(0.02 if "too long" in step else 60.0))
    engine.serve(Request("before", PROMPT))
    engine.idle()
    engine.workers[0]._store.tiers[0].clear()
    engine.step({}, [], Request("nobody", []))
    yield Bench(engine, made[0])
    made[0].gate.set()
    engine.close()


def test_its_blocks_are_anothers_and_nothing_of_it_stays(bench: Bench, step: str) -> None:
    engine, disk, scheduler, got_to = bench.engine, bench.disk, bench.engine.scheduler, STEPS.index(step)
    request, nobody, named = Request("aborted", PROMPT), Request("nobody", []), set[str]()
    ids = [engine._free.pop() for _ in range(11)]

    def until_named() -> None:
        while "aborted" not in named:
            named.update(engine.step({}, ids, nobody)[0])

    scheduler.track(request)
    if got_to >= STEPS.index("was offered pages"):
        assert scheduler.offer(request, 0) == 10
    if got_to >= STEPS.index("has blocks"):
        scheduler.allocated(request, ids, 10 * BLOCK)
    if got_to >= STEPS.index("is loading"):
        named.update(engine.step({}, ids, nobody)[0])
        assert disk.reading.wait(60)
    if got_to >= STEPS.index("has its pages"):
        disk.gate.set()
        until_named()
    if step == "computes":
        request.num_computed_tokens = 10 * BLOCK
        engine.step({"aborted": 3}, ids, request)
    scheduler.finished("aborted")
    if got_to >= STEPS.index("has blocks"):
        if step != "is loading too long":  # then its time is up with the gate closed
            disk.gate.set()
        until_named()  # till then vLLM keeps the blocks: something may still be written there
    engine._free += ids
    served = engine.serve(Request("another", OTHER))
    assert (served.loaded, set(served.block_ids)) == (0, set(ids))
    disk.gate.set()
    engine.idle()
    names = Request("", OTHER).block_hashes
    assert all(engine.holds(block_id, name) for block_id, name in zip(served.block_ids, names, strict=False))
    assert not scheduler._requests
