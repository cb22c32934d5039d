"""``./bench sglang_plugin``: what SGLang's storage calls cost over this store.

Over host memory in SGLang's layout (K and V apart), a disk and a Valkey of our own on its unix socket:

* ``set``: CPU seconds per GB of this process until everything is in the last tier, and how long the calls themselves
  took, in seconds per GB: that is what SGLang's one writing thread is held up.
* ``get``: CPU seconds per GB, and GB/s on the wall; every page is checked and scattered into place. From disk nothing
  of the slab is in the page cache.
* ``exists``: microseconds for a prompt of 128 pages that are all there.

``memcpy`` is the yardstick. Batches are of 32 pages.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvstore.plugins.sglang.backend import Backend
from kvstore.tiers.pool_server import PoolServer
from tests.samples.sglang_host import FACTS, FakeConfig, FakeHostPool, key_chain

BATCH = 32
SIZES = {"128K": 128 << 10, "512K": 512 << 10, "2M": 2 << 20}


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return CPU seconds of this process and seconds on the wall."""
    before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.monotonic() - began_s


def forget_cached(folder: Path) -> None:
    """Drop the slabs from the page cache."""
    for slab in folder.glob("*/pages.slab"):
        fd = os.open(slab, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def figures_of(medium: str, page_bytes: int, total: int, folder: Path, server: PoolServer) -> dict[str, float]:
    """Measure one medium with pages of this size."""
    count = max(128, total // page_bytes // BATCH * BATCH)
    pool = FakeHostPool(pages=2 * count, layers=1, heads=page_bytes // 1024, dim=16)
    assert pool.page_bytes == page_bytes
    gigabytes = count * page_bytes / 1e9
    room = 1.2 * gigabytes + 0.01
    place = {"disk": str(folder), "disk_gb": room} if medium == "disk" else {"pool": server.url, "pool_gb": room}
    options = {"interface_v1": 1, "weights_id": "bench", "namespace": str(page_bytes), "buffer_gb": room,
               "prefill_tokens_per_s": 0.001, "deadline_ms": 10_000.0, **place}  # fmt: skip
    backend = Backend(FakeConfig(options), {}, facts=FACTS)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    shelf = backend.shelves["kv"]
    pool.memory[:] = np.random.default_rng(1).integers(0, 256, pool.memory.shape, np.uint8)
    keys = key_chain(count, str(page_bytes))
    starts = range(0, count, BATCH)
    held_s = 0.0

    def put() -> None:
        nonlocal held_s
        began_s = time.monotonic()
        for at in starts:
            assert all(backend.batch_set_v1(keys[at : at + BATCH], pool.slots(range(at, at + BATCH))))
        held_s = time.monotonic() - began_s
        assert shelf.store.flush(120.0)

    def get() -> None:
        for at in starts:
            slots = pool.slots(range(count + at, count + at + BATCH))
            assert all(backend.batch_get_v1(keys[at : at + BATCH], slots))

    put_cpu_s, _ = measured(put)
    shelf.store.tiers[0].clear()  # what is read comes from disk or pool
    forget_cached(folder)
    get_cpu_s, get_s = measured(get)
    asked_s = min(measured(lambda: backend.batch_exists(keys[:128]))[1] for _ in range(20))
    copy_cpu_s, _ = measured(lambda: np.copyto(pool.memory[:, count:], pool.memory[:, :count]))
    backend.close()
    return {
        "set CPU s/GB": round(put_cpu_s / gigabytes, 2),
        "set held s/GB": round(held_s / gigabytes, 2),
        "get CPU s/GB": round(get_cpu_s / gigabytes, 2),
        "get GB/s": round(gigabytes / get_s, 2),
        "exists µs": round(asked_s * 1e6),
        "memcpy CPU s/GB": round(copy_cpu_s / gigabytes, 2),
    }


def main(argv: Sequence[str]) -> int:
    """Print a line for each medium and size."""
    arguments = argparse.ArgumentParser(
        prog="./bench sglang_plugin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--total", type=int, default=128 << 20)
    options = arguments.parse_args(argv)
    told: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch, PoolServer(max_bytes=2 << 30) as server:
        for medium in ("disk", "pool"):
            for name, page_bytes in SIZES.items():
                folder = Path(scratch) / f"{medium}-{name}"
                folder.mkdir()
                told[f"{medium} {name}"] = figures_of(medium, page_bytes, options.total, folder, server)
                print(f"{medium} {name}: {told[f'{medium} {name}']}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
