"""Whoever gives a read up, at whichever of its steps: nobody's memory is written afterwards, and nobody else notices.

A read is walked: each look at a target, each question to disk and pool, before it and after it, and each promotion of
what they brought is a step, and at the n-th of them its caller gives up. Then it has its buffers back and writes into
them what must stay there. Copies from memory to memory are no steps: they are made under the read's lock, at one go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.deadline import Allowance
from kvstore.page import PageKey, Tier
from kvstore.page_store import PageStore, PageStoreOptions
from kvstore.tiers.base import Found, Page
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data

PAGE = LAYOUT.page_bytes
PAGES = chain(6)
KEYS = [key for key, _ in PAGES]
RIGHT = [page_data(key) for key in KEYS]
MINE = b"\xa5" * PAGE
PATIENT = Allowance(60.0)
GIVE_UP_S = 0.05
"""How long the caller that gives up had been ready to wait."""


@dataclass
class Steps:
    """Counts the steps of reads; at the chosen one it calls ``then``, once."""

    chosen: int = -1
    then: Callable[[], None] = lambda: None
    taken: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    def step(self) -> None:
        with self.guard:
            is_chosen = self.taken == self.chosen
            self.taken += 1
        if is_chosen:
            self.then()


@dataclass(frozen=True, slots=True)
class WalkedTarget:
    """Buffers; looking at one is a step. ``is_reached``: whether tiers may write to them directly."""

    buffers: Sequence[memoryview]
    steps: Steps
    is_reached: bool = True

    def view(self, place: int) -> memoryview | None:
        self.steps.step()
        return self.buffers[place] if self.is_reached else None

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        for place, one in zip(places, data, strict=True):
            self.buffers[place][:] = one
        return True


class WalkedHost(HostTier):
    """Memory: what is promoted there makes two steps."""

    steps: Steps

    def put(self, pages: Sequence[Page]) -> list[bool]:
        self.steps.step()
        answers = super().put(pages)
        self.steps.step()
        return answers


class WalkedDisk(DiskTier):
    """A real disk: each read makes two steps."""

    steps: Steps

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        self.steps.step()
        answers = super().get(keys, out)
        self.steps.step()
        return answers


class WalkedPool(PoolTier):
    """A real Valkey: each read makes two steps."""

    steps: Steps

    def get(self, keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        self.steps.step()
        answers = super().get(keys, out)
        self.steps.step()
        return answers


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=32 << 20) as running:
        yield running


class Walk:
    """A store with two pages in each tier, read in windows of two."""

    def __init__(self, folder: Path, server: PoolServer, steps: Steps, threads: int = 2) -> None:
        folder.mkdir()
        disk = WalkedDisk(LAYOUT, folder, capacity_bytes=8 * PAGE, options=DiskOptions(read_s=PATIENT))
        pool = WalkedPool(LAYOUT, server.url, capacity_bytes=8 * PAGE, options=PoolOptions(read_s=PATIENT))
        tiers = (WalkedHost(LAYOUT, capacity_bytes=8 * PAGE), disk, pool)
        for number, tier in enumerate(tiers):
            tier.steps = Steps()
            assert all(tier.put([page(entry) for entry in PAGES[2 * number : 2 * number + 2]]))
            tier.steps = steps
        self.steps = steps
        self.store = PageStore(tiers, PageStoreOptions(get_s=PATIENT, window_bytes=2 * PAGE, fetch_threads=threads))

    def read(
        self, out: Sequence[memoryview], *, timeout_s: float = 60.0, is_reached: bool = True
    ) -> Future[list[Tier | None]]:
        return self.store.start_get(KEYS, WalkedTarget(out, self.steps, is_reached), timeout_s=timeout_s)


WHERE = [Tier.HOST] * 2 + [Tier.DISK] * 2 + [Tier.POOL] * 2
REACHED = pytest.mark.parametrize("is_reached", [True, False], ids=["own buffers", "an engine's scattered memory"])


def steps_of_a_read(folder: Path, server: PoolServer, *, is_reached: bool) -> int:
    """Walk once with nobody giving up."""
    walk = Walk(folder / "counted", server, Steps())
    out = buffers(len(KEYS))
    assert walk.read(out, is_reached=is_reached).result(60) == WHERE
    assert contents(out) == RIGHT
    walk.store.close()
    assert walk.steps.taken > 10
    return walk.steps.taken


def contents(out: Sequence[memoryview]) -> list[bytes]:
    return [bytes(buffer) for buffer in out]


def assert_right(filled: Sequence[Tier | None], out: Sequence[memoryview]) -> None:
    """What is said to be there is there."""
    assert all(at is None or data == right for at, data, right in zip(filled, contents(out), RIGHT, strict=True))


def reuse(out: Sequence[memoryview]) -> None:
    """The caller has its buffers back."""
    for buffer in out:
        buffer[:] = MINE


@REACHED
def test_a_caller_whose_time_is_up_at_any_step_is_written_to_no_more(
    is_reached: bool, tmp_path: Path, server: PoolServer
) -> None:
    for chosen in range(steps_of_a_read(tmp_path, server, is_reached=is_reached)):
        reused = threading.Event()
        steps = Steps(chosen, lambda reused=reused: reused.wait(60))  # type: ignore[misc]
        walk = Walk(tmp_path / str(chosen), server, steps)
        out, others = buffers(len(KEYS)), buffers(len(KEYS))
        hanging = walk.read(out, timeout_s=GIVE_UP_S, is_reached=is_reached)
        other = walk.read(others, is_reached=is_reached)
        assert_right(hanging.result(60), out)
        reuse(out)
        reused.set()
        assert None not in other.result(60), chosen
        assert contents(others) == RIGHT, chosen
        walk.store.check()
        walk.store.close()
        assert contents(out) == [MINE] * len(KEYS), chosen


@REACHED
def test_a_store_that_is_closed_at_any_step_of_a_read_answers_and_writes_no_more(
    is_reached: bool, tmp_path: Path, server: PoolServer
) -> None:
    for chosen in range(steps_of_a_read(tmp_path, server, is_reached=is_reached)):
        steps, answered = Steps(chosen), threading.Event()
        walk = Walk(tmp_path / str(chosen), server, steps)
        closer = threading.Thread(target=walk.store.close)

        def close(closer: threading.Thread = closer, answered: threading.Event = answered) -> None:
            closer.start()
            answered.wait(60)

        steps.then = close
        out = buffers(len(KEYS))
        filled = walk.read(out, is_reached=is_reached).result(60)
        assert_right(filled, out)
        reuse(out)
        answered.set()
        closer.join()
        assert contents(out) == [MINE] * len(KEYS), chosen


@REACHED
def test_a_read_that_is_cancelled_at_any_step_of_the_one_before_it_never_happens(
    is_reached: bool, tmp_path: Path, server: PoolServer
) -> None:
    for chosen in range(steps_of_a_read(tmp_path, server, is_reached=is_reached)):
        cancelled, waits, steps = list[bool](), list[Future[list[Tier | None]]](), Steps(chosen)
        queued = threading.Event()

        def cancel(
            cancelled: list[bool] = cancelled,
            waits: list[Future[list[Tier | None]]] = waits,
            queued: threading.Event = queued,
        ) -> None:
            queued.wait(60)
            cancelled.append(waits[0].cancel())

        steps.then = cancel
        walk = Walk(tmp_path / str(chosen), server, steps, threads=1)
        first, second, third = (buffers(len(KEYS)) for _ in range(3))
        running = walk.read(first, is_reached=is_reached)
        waits.append(walk.read(second, is_reached=is_reached))
        last = walk.read(third, is_reached=is_reached)
        queued.set()
        assert running.result(60) == WHERE
        assert None not in last.result(60)
        assert (contents(first), contents(third)) == (RIGHT, RIGHT)
        assert cancelled == [True]
        walk.store.close()
        assert contents(second) == [bytes(PAGE)] * len(KEYS), chosen
