"""``./bench store [--json FILE] [--sizes …] [--batches …] [--total BYTES]``: what the page tiers cost.

* ``host``, ``disk`` and ``pool`` (a Valkey of our own, over its unix socket): CPU seconds per GB, of this process and
  the server together, and GB/s on the wall, for put (checksums included), get, and for the disk get with nothing of its
  files in the page cache. Checksums are verified on every read. ``memcpy`` is the yardstick: a plain copy of the same
  bytes in the same process.
* ``exists``: keys a second.
* ``store``: a put into host and disk returns at the first figure; the second is until the disk has it.
* ``resident_growth_bytes``: of this process over ten times all of the host and disk puts and gets, after the first.

CPU seconds move less than wall time on a machine that does other things. Each figure is the median of ``--rounds``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import redis

from kvstore.codec import checksum
from kvstore.memory import page_rows
from kvstore.page import PageKey, PageLayout, PageMeta, page_key
from kvstore.page_store import PageStore, PageStoreOptions
from kvstore.tiers.base import Page, PageTier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer

_META = PageMeta(None, bytes(64))
_TICKS = os.sysconf("SC_CLK_TCK")
_FLUSH_S = 120.0
Figures = dict[str, list[tuple[float, float]]]


class Batches:
    """The same pages for every tier: memory to put from and to get into, keys, in batches."""

    def __init__(self, page_bytes: int, batch: int, total: int) -> None:
        self.layout = PageLayout("bench", "uint8", page_tokens=16, layers=1, kv_heads=1, head_dim=page_bytes // 32)
        self.batch, self.pages = batch, max(batch, total // page_bytes // batch * batch)
        self.bytes = self.pages * page_bytes
        self._source, self._target = page_rows(self.pages, page_bytes), page_rows(self.pages, page_bytes)
        self._source[:] = np.random.default_rng(1).integers(0, 256, (self.pages, page_bytes), np.uint8)
        self.data, self.out = ([memoryview(row) for row in rows] for rows in (self._source, self._target))
        self.keys: list[PageKey] = []

    def rename(self, number: int) -> None:
        """Give the pages new keys, so that they are stored again."""
        name = self.layout.fingerprint
        self.keys = [page_key(name, hashlib.sha256(b"%d/%d" % (number, i)).digest()) for i in range(self.pages)]

    def starts(self) -> range:
        """Return where each batch begins."""
        return range(0, self.pages, self.batch)

    def put(self, put: Callable[[list[Page]], list[bool]]) -> None:
        """Put all of them, checksums included."""
        for start in self.starts():
            keys, data = self.keys[start : start + self.batch], self.data[start : start + self.batch]
            assert all(put([Page(k, _META, d, checksum(d)) for k, d in zip(keys, data, strict=True)]))

    def get(self, tier: PageTier) -> None:
        """Get all of them."""
        for start in self.starts():
            found = tier.get(self.keys[start : start + self.batch], self.out[start : start + self.batch])
            assert None not in found

    def exists(self, tier: PageTier) -> None:
        """Ask for all of them."""
        for start in self.starts():
            assert all(tier.exists(self.keys[start : start + self.batch]))

    def copy(self) -> None:
        """Copy them: the yardstick."""
        np.copyto(self._target, self._source)


@contextmanager
def timed(figures: Figures, name: str, amount: float, pid: int | None) -> Iterator[None]:
    """Add (CPU seconds for each unit of ``amount``, units a second)."""
    cpu_s, begun_s = _cpu_s(pid), time.perf_counter()
    yield
    figures.setdefault(name, []).append(((_cpu_s(pid) - cpu_s) / amount, amount / (time.perf_counter() - begun_s)))


def _cpu_s(pid: int | None) -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    if pid is not None:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def measure_tier(batches: Batches, tier: PageTier, rounds: int, files: Path | None, pid: int | None) -> Figures:
    """Put, ask, get; with ``files`` also get after these have left the page cache."""
    figures: Figures = {}
    gigabytes = batches.bytes / 1e9
    for number in range(rounds):
        batches.rename(number)
        with timed(figures, "put", gigabytes, pid):
            batches.put(tier.put)
        with timed(figures, "exists", batches.pages, pid):
            batches.exists(tier)
        with timed(figures, "get", gigabytes, pid):
            batches.get(tier)
        if files is not None:
            _drop(files)
            with timed(figures, "get_cold", gigabytes, pid):
                batches.get(tier)
        with timed(figures, "memcpy", gigabytes, None):
            batches.copy()
    return figures


def measure_behind(batches: Batches, folder: Path, rounds: int) -> Figures:
    """Put into a store of host and disk: until it returns, and until the disk has it."""
    figures: Figures = {}
    host, disk = HostTier(batches.layout, capacity_bytes=2 * batches.bytes), _disk(batches, folder)
    store = PageStore([host, disk], PageStoreOptions(behind_bytes=batches.bytes))
    for number in range(rounds):
        batches.rename(number)
        with timed(figures, "put_until_written", batches.bytes / 1e9, None):
            with timed(figures, "put_until_returned", batches.bytes / 1e9, None):
                batches.put(store.put)
            assert store.flush(_FLUSH_S)
    assert store.dropped == 0
    store.close()
    return figures


def resident_growth(batches: Batches, folder: Path) -> int:
    """Return how much this process grew while everything was moved ten times, after the first."""
    tiers: list[PageTier] = [HostTier(batches.layout, capacity_bytes=2 * batches.bytes), _disk(batches, folder)]
    sizes = []
    gc.collect()  # the tiers that were measured before
    for number in range(11):
        batches.rename(1000 + number)
        for tier in tiers:
            batches.put(tier.put)
            batches.get(tier)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    for tier in tiers:
        tier.close()
    return sizes[-1] - sizes[0]


def measure(page_bytes: int, batch: int, total: int, rounds: int) -> dict[str, object]:
    """Return all figures of one page size and batch."""
    batches = Batches(page_bytes, batch, total)
    report: dict[str, object] = {"page_bytes": page_bytes, "batch": batch, "total_bytes": batches.bytes}
    with tempfile.TemporaryDirectory(prefix="keepwarm-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        host = HostTier(batches.layout, capacity_bytes=2 * batches.bytes)
        report["host"] = _medians(measure_tier(batches, host, rounds, None, None))
        disk = _disk(batches, folder / "disk")
        report["direct"] = disk.direct
        report["disk"] = _medians(measure_tier(batches, disk, rounds, folder / "disk", None))
        disk.close()
        report["store"] = _medians(measure_behind(batches, folder / "behind", rounds))
        report["resident_growth_bytes"] = resident_growth(batches, folder / "growth")
    with PoolServer(max_bytes=4 * batches.bytes + (64 << 20)) as server:
        with redis.Redis.from_url(server.url) as client:
            pid = int(client.info("server")["process_id"])
        pool = PoolTier(batches.layout, server.url, capacity_bytes=2 * batches.bytes)
        report["pool"] = _medians(measure_tier(batches, pool, rounds, None, pid))
        pool.close()
    return report


def _disk(batches: Batches, folder: Path) -> DiskTier:
    return DiskTier(batches.layout, folder, capacity_bytes=2 * batches.bytes)


def _drop(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _medians(figures: Figures) -> dict[str, dict[str, float]]:
    result = {}
    for name, pairs in figures.items():
        cpu, rate = (statistics.median(values) for values in zip(*pairs, strict=True))
        result[name] = {"keys_per_s": rate} if name == "exists" else {"cpu_s_per_gb": cpu, "gb_per_s": rate}
    return result


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="./bench store", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--sizes", default="131072,524288,2097152")
    parser.add_argument("--batches", default="32,128")
    parser.add_argument("--total", type=int, default=128 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    reports = []
    for size in map(int, args.sizes.split(",")):
        for batch in map(int, args.batches.split(",")):
            reports.append(report := measure(size, batch, args.total, args.rounds))
            print(f"{size >> 10} KiB, batches of {batch}; resident set {report['resident_growth_bytes']:+} bytes")
            for place in ("host", "disk", "store", "pool"):
                for name, figures in report[place].items():  # type: ignore[attr-defined]
                    values = "  ".join(f"{value:14.3f} {what}" for what, value in figures.items())
                    print(f"  {place:6}{name:20}{values}")
            sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(reports, indent=2) + "\n")
    return 0
