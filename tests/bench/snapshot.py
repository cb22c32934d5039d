"""``./bench snapshot [--blocks N] [--json FILE]``: what it takes to write the index down in passing, and to read it.

An index of ``--blocks`` blocks (default 4,000,000, as many as the default budget holds) in chains of 64 over 64
instances, a tenth of them with two holders, is written by ``gateway.snapshots`` and restored into a fresh one. The
pauses are those of a task that does nothing but give way, on the same event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from gateway.feeds import Feed
from gateway.snapshots import IndexSnapshots, SnapshotOptions
from kvstore.page import Tier
from radix_index.index import RadixIndex
from radix_index.snapshot import SourceState

INSTANCES, CHAIN, BUDGET = 64, 64, 1 << 30


class Source:
    """A feed that is whole."""

    resets, pool, is_settling = 0, None, False

    def __init__(self, number: int) -> None:
        self.number = number

    def state(self) -> SourceState:
        """Return where it stands."""
        name = f"instance-{self.number}"
        return SourceState(name, "tcp://x", "m", 16, None, 5, ((4, 1.0),), "complete", ((None, False),))


class Pauses:
    """How long the event loop did not come back to a task that only gives way."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    async def watch(self) -> None:
        """Give way for ever."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.seen.append(now - last)
            last = now

    def taken(self) -> dict[str, float]:
        """Return milliseconds, and begin anew."""
        p50, p99, longest = (float(each) for each in np.percentile(self.seen, [50, 99, 100]) * 1e3)
        self.seen.clear()
        return {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(longest, 3)}


def filled(blocks: int) -> RadixIndex:
    """Return an index of random chains."""
    index, chance = RadixIndex(byte_budget=BUDGET), np.random.default_rng(0)
    for number in range(INSTANCES):
        index.add_instance(f"instance-{number}", block_size=16)
    for chain in range(blocks // CHAIN):
        hashes = chance.integers(1, 2**63, CHAIN, dtype=np.uint64)
        for holder in range(1 + (chain % 10 == 0)):
            index.stored(f"instance-{(chain + holder) % INSTANCES}", Tier.DEVICE, hashes, hashes ^ np.uint64(1))
    return index


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(blocks: int, folder: Path) -> dict[str, Any]:
    """Write, restore, and return the figures."""
    index, pauses = filled(blocks), Pauses()
    path, options = folder / "index.snapshot", SnapshotOptions(byte_limit=BUDGET)
    feeds = cast(list[Feed], [Source(number) for number in range(INSTANCES)])
    watching = asyncio.create_task(pauses.watch())
    await asyncio.sleep(0)
    before, spent, begun = resident_bytes(), time.process_time(), time.perf_counter()
    assert await IndexSnapshots(path, index, time.time, options).save(lambda: feeds)
    written = {
        "bytes": path.stat().st_size,
        "cpu_s": round(time.process_time() - spent, 2),
        "wall_s": round(time.perf_counter() - begun, 2),
        "added_bytes": resident_bytes() - before,
        "pause_ms": pauses.taken(),
    }
    fresh = RadixIndex(byte_budget=BUDGET)
    spent, begun = time.process_time(), time.perf_counter()
    await IndexSnapshots(path, fresh, time.time, options).restore({f"instance-{n}" for n in range(INSTANCES)})
    restored = {"cpu_s": round(time.process_time() - spent, 2), "wall_s": round(time.perf_counter() - begun, 2)}
    watching.cancel()
    assert fresh.stats().blocks == index.stats().blocks
    return {"blocks": index.stats().blocks, "write": written, "restore": restored}


def main(argv: Sequence[str]) -> int:
    """Run it."""
    arguments = argparse.ArgumentParser(prog="./bench snapshot", description=__doc__)
    arguments.add_argument("--blocks", type=int, default=4_000_000)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options.blocks, Path(folder)))
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures))
    return 0
