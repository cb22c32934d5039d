"""What storing pages encrypted or in fp8 costs, and what fp8 loses: ``python -m tests.bench.at_rest``.

CPU seconds for each GB of the engine's pages, by the process that stores them, on a disk tier of its own and a Valkey
of its own; plain pages beside them in the same run, and a host tier of its own and a shared one, daemon included.
``exists`` is told in millions of keys a second.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import threading
import time
from pathlib import Path

import torch

from kvstore.at_rest import ALL, AtRest
from kvstore.codec import checksum
from kvstore.deadline import Allowance
from kvstore.encryption import KEY_BYTES, KeyRing
from kvstore.memory import page_rows
from kvstore.page import PageLayout, PageMeta, page_key
from kvstore.shared_host import SharedHost
from kvstore.tiers.base import Page, PageTier
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.shared_client import SharedHostOptions
from kvstore.tiers.shared_host import SharedHostTier

BATCH = 32
PATIENT = Allowance(600.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=128, help="of pages, for each figure")
    parser.add_argument("--kib", type=int, nargs="+", default=[512, 2048], help="of a page")
    args = parser.parse_args()
    ring = KeyRing([secrets.token_bytes(KEY_BYTES)])
    forms = {"plain": AtRest(), "encrypted": AtRest(ring), "fp8": AtRest(fp8=ALL), "both": AtRest(ring, fp8=ALL)}
    print(f"{'':>34}{'put CPU s/GB':>14}{'get CPU s/GB':>14}{'exists M/s':>12}")
    for kib in args.kib:
        layout = PageLayout("bench", "bfloat16", page_tokens=16, layers=kib // 32, kv_heads=4, head_dim=128)
        assert layout.page_bytes == kib << 10
        pages = _pages(layout, max(BATCH, (args.mb << 20) // layout.page_bytes // BATCH * BATCH))
        room = 2 * len(pages) * layout.page_bytes
        _measure(f"host {kib} KiB", HostTier(layout, capacity_bytes=room), pages)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "host.sock"
            daemon = SharedHost(path, capacity_bytes=room)
            threading.Thread(target=daemon.serve, daemon=True).start()
            shared = SharedHostTier(layout, path, capacity_bytes=room, options=SharedHostOptions(ask_s=PATIENT))
            _measure(f"shared host {kib} KiB", shared, pages)
            shared.close()
            daemon.close()
        for name, at_rest in forms.items():
            with tempfile.TemporaryDirectory() as folder, PoolServer(max_bytes=room + (64 << 20)) as server:
                disk = DiskOptions(read_s=PATIENT, write_s=PATIENT, at_rest=at_rest)
                pool = PoolOptions(read_s=PATIENT, write_s=PATIENT, at_rest=at_rest)
                for tier in (
                    DiskTier(layout, Path(folder), capacity_bytes=room, options=disk),
                    PoolTier(layout, server.url, capacity_bytes=room, options=pool),
                ):
                    _measure(f"{tier.tier.label} {kib} KiB {name}", tier, pages)
                    tier.close()


def _pages(layout: PageLayout, count: int) -> list[Page]:
    """Return pages of normal numbers, as keys and values roughly are."""
    rows = page_rows(count, layout.page_bytes)
    numbers = torch.randn(layout.page_bytes // 2, generator=torch.Generator().manual_seed(1))
    pages = []
    for place, row in enumerate(rows):
        torch.from_numpy(row).view(torch.bfloat16).copy_(numbers.roll(place))
        data = memoryview(row)
        key = page_key(layout.fingerprint, place.to_bytes(32, "big"))
        pages.append(Page(key, PageMeta(None, bytes(64)), data, checksum(data)))
    return pages


def _measure(name: str, tier: PageTier, pages: list[Page]) -> None:
    keys, gigabytes = [page.key for page in pages], len(pages) * tier.page_bytes / 1e9
    out = [memoryview(row) for row in page_rows(BATCH, tier.page_bytes)]
    batches = [slice(start, start + BATCH) for start in range(0, len(pages), BATCH)]
    begun_s = time.process_time()
    for batch in batches:
        assert all(tier.put(pages[batch]))
    put_s = time.process_time() - begun_s
    begun_s = time.process_time()
    for batch in batches:
        assert None not in tier.get(keys[batch], out)
    get_s = time.process_time() - begun_s
    many = (keys * (128 // len(keys) + 1))[:128]
    begun_s, rounds = time.perf_counter(), 200
    for _ in range(rounds):
        tier.exists(many)
    rate = rounds * len(many) / (time.perf_counter() - begun_s) / 1e6
    print(f"{name:>34}{put_s / gigabytes:>14.2f}{get_s / gigabytes:>14.2f}{rate:>12.2f}")


if __name__ == "__main__":
    main()
