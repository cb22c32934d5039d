"""``./bench vllm_connector``: what the vLLM connector's halves cost, around real tiers and torch CPU tensors.

The engine's cache has the shape of vLLM's (``[blocks, heads, tokens, 2 × head dim]`` a layer, bfloat16). Each figure
stands beside the floor of the same run: a copy of the same bytes from one tensor to another.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore.deadline import Allowance
from kvstore.page import PageLayout, PageMeta, Tier
from kvstore.plugins.vllm.messages import Hello, Load, Save, StepPlan, Stored
from kvstore.plugins.vllm.paged_cache import PagedCache
from kvstore.plugins.vllm.scheduler import SchedulerHalf
from kvstore.plugins.vllm.worker import WorkerHalf, WorkerLimits
from kvstore.tiers.base import PageTier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.worth import FetchWorth, WorthOptions
from tests.samples.paged_engine import Request

PAGES = 64
SHAPES = {"128 KiB": (32, 1, 16, 128), "512 KiB": (32, 4, 16, 128), "2 MiB": (32, 8, 16, 256)}
"""Layers, heads, tokens, content of a block: Llama-3.1-8B over eight ranks and two, and whole."""


class Timed:
    """CPU seconds of all threads and wall seconds of a piece of work."""

    def __init__(self, work: Callable[[], object]) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        self.cpu_s, self.wall_s = time.process_time() - cpu, time.perf_counter() - wall

    def of(self, moved_bytes: int) -> dict[str, float]:
        return {
            "cpu_s_per_gb": round(self.cpu_s / moved_bytes * 1e9, 3),
            "gb_per_s": round(moved_bytes / self.wall_s / 1e9, 2),
        }


def _best(works: list[Timed], moved_bytes: int) -> dict[str, float]:
    return min((each.of(moved_bytes) for each in works), key=lambda found: found["cpu_s_per_gb"])


def moves(shape: tuple[int, int, int, int], folder: Path, pool: str, rounds: int) -> dict[str, Any]:
    """Return what saving and loading costs for pages of one shape."""
    layers, heads, tokens, content = shape
    caches = {f"l{n}": torch.rand((2 * PAGES, heads, tokens, content)).to(torch.bfloat16) for n in range(layers)}
    cache = PagedCache(caches, 2 * PAGES)
    size = cache.page_bytes
    (folder / str(size)).mkdir()
    layout = PageLayout(f"bench-{size}", "uint8", tokens, 1, 1, size // tokens, is_mla=True)
    moved = PAGES * size
    found: dict[str, Any] = {"page_bytes": size}
    source, target = torch.zeros(moved, dtype=torch.uint8), torch.ones(moved, dtype=torch.uint8)
    found["floor: copy"] = _best([Timed(lambda: target.copy_(source)) for _ in range(rounds)], moved)
    disk = DiskTier(layout, folder / str(size), capacity_bytes=8 * moved)
    for name, tier in (("disk", disk), ("pool", PoolTier(layout, pool, capacity_bytes=8 * moved))):
        found |= _of_tier(name, tier, cache, layout, rounds, caches["l0"])
    return found


def _of_tier(
    name: str, tier: PageTier, cache: PagedCache, layout: PageLayout, rounds: int, first_layer: torch.Tensor
) -> dict[str, Any]:
    """Save and load the same pages over and over, under new names, each time from host and from the tier below it."""
    moved = PAGES * cache.page_bytes
    host = HostTier(layout, capacity_bytes=2 * moved)
    worker = WorkerHalf(0, cache, layout, [host, tier], WorkerLimits(Allowance(60.0)))
    saved, behind, warm, cold = list[Timed](), list[Timed](), list[Timed](), list[Timed]()
    meta = PageMeta(None, bytes(4 * layout.page_tokens))
    for number in range(rounds):
        names = tuple(bytes([number, place]) + bytes(30) for place in range(PAGES))
        saves = tuple(Save(each, meta, place) for place, each in enumerate(names))
        load = StepPlan(2 * number + 2, True, (Load("r", names, tuple(range(PAGES, 2 * PAGES))),))
        worker.begin(StepPlan(2 * number + 1, is_idle=False, saves=saves))
        saved.append(Timed(worker.save))
        behind.append(Timed(partial(worker._store.flush, 60.0)))
        warm.append(Timed(partial(_load, worker, load)))
        host.clear()
        cold.append(Timed(partial(_load, worker, load)))
        assert torch.equal(first_layer[:PAGES], first_layer[PAGES:])
        host.clear()
    worker.close()
    return {
        f"save, and behind it to {name}": _best(saved, moved),
        f"… what then is left to write to {name}": _best(behind, moved),
        f"load from host ({name} below)": _best(warm, moved),
        f"load from {name}": _best(cold, moved),
    }


def _load(worker: WorkerHalf, step: StepPlan) -> None:
    worker.begin(step)
    while not worker.finished():
        pass
    assert not worker.failed()


def decisions(rounds: int) -> dict[str, float]:
    """Return what the scheduler's half costs a request of 4,096 tokens (256 blocks) and a step, in µs."""
    tokens = list(range(4096))
    half = SchedulerHalf(16, FetchWorth(WorthOptions()), lambda layouts: None)
    names = tuple(bytes([place % 256, place // 256]) + bytes(30) for place in range(256))
    stored = Stored(Tier.HOST, tuple((each, PageMeta(None, b"")) for each in names))
    half.greet([Hello(0, PageLayout("bench", "uint8", 16, 1, 1, 64, is_mla=True), (stored,))])
    half.take_changes()

    class Known(Request):
        """Its blocks are hashed by vLLM before the connector sees them."""

        @property
        def block_hashes(self) -> list[bytes]:
            return list(names)

    request = Known("r", tokens)
    offers, steps = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        half.track(request)
        half.offer(request, 0)
        offers.append(time.perf_counter() - began)
        request.num_computed_tokens = 4095
        half.plan({"r": 1}, {}, lambda _: range(256))
        began = time.perf_counter()
        half.plan({"r": 1}, {}, lambda _: range(256))
        steps.append(time.perf_counter() - began)
        half.finished("r")
        request.num_computed_tokens = 0
    return {"offer_us": round(min(offers) * 1e6, 1), "decode_step_us": round(min(steps) * 1e6, 1)}


def main(argv: list[str]) -> int:
    """Print the figures; ``--json FILE`` writes them."""
    arguments = argparse.ArgumentParser(prog="./bench vllm_connector", description=__doc__)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args(argv)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"scheduler": decisions(50)}
    with tempfile.TemporaryDirectory() as folder, PoolServer(max_bytes=3 << 30) as pool:
        for name, shape in SHAPES.items():
            figures[name] = moves(shape, Path(folder), pool.url, options.rounds)
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
