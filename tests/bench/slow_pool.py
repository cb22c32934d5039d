"""``./bench slow_pool``: does a pool that is slower than computing make anybody's first token later?

Both plug-ins with their real calls, over a real Valkey behind a proxy that takes its time, around a stand-in for the
engine that computes a page in ``PAGE_S``. Prompts that the pool holds, at an engine that reaches it at some speed, in
turn with prompts of the same length at an engine without a pool. ``pace`` is how long the pool takes for a page, in
units of how long computing it takes. Every first token counts, those in which the pace is still being learned, too.

The bar: all prompts together take at most ``MOST`` times as long as with no pool, at every pace, and a pool of a pace
below ``USED_BELOW`` makes them sooner.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from kvstore.page import PageLayout
from kvstore.plugins.sglang.backend import Backend
from kvstore.plugins.vllm.assembly import open_lookup, open_tiers
from kvstore.plugins.vllm.options import read_options
from kvstore.tiers.base import PageTier
from kvstore.tiers.pool_server import PoolServer
from tests.samples.paged_engine import BLOCK, PAGE_BYTES, PagedEngine, Request
from tests.samples.ports import free_ports
from tests.samples.sglang_host import FACTS, FakeConfig, FakeHostPool, key_chain
from tests.samples.slow_way import SlowWay

PAGES = 32
PAGE_S = 0.004
PROMPTS = 32
PACES = (0.1, 0.5, 2.0, 10.0)
MOST = 1.1
USED_BELOW = 0.4
LATENCY_S = 0.004
PATIENCE: dict[str, dict[str, float]] = {"defaults": {}, "patient": {"deadline_ms": 10_000.0, "least_mb_per_s": 0.01}}
"""With the defaults a pool below 100 MB/s is late, and out of use for a while; patience leaves it to the forecast."""


class Engine(Protocol):
    """An engine with one of the plug-ins."""

    page_bytes: int

    def first_token(self, number: int) -> tuple[float, int]:
        """Serve the prompt of a number; return the seconds until its first token, and pages that were fetched."""

    def settle(self) -> None:
        """Wait until all that was computed is stored."""

    def close(self) -> None:
        """End it."""


class Sglang:
    """SGLang's order of calls: ask, fetch what is claimed, compute the rest, store it."""

    def __init__(self, options: dict[str, Any], name: str) -> None:
        self._host = FakeHostPool(pages=2 * PAGES)
        self.page_bytes = self._host.page_bytes
        given = {
            "interface_v1": 1,
            "weights_id": "bench",
            "buffer_gb": 0.01,
            "host_gb": 0.001,
            "pool_gb": 0.01,
            **options,
        }
        self._backend = Backend(FakeConfig(given, model_name=name), {}, facts=FACTS)
        self._backend.register_mem_pool_host(self._host)
        self._backend.on_host_pools_registered()

    def first_token(self, number: int) -> tuple[float, int]:
        keys, began_s = key_chain(PAGES, str(number)), time.monotonic()
        claimed = self._backend.batch_exists(keys)
        came = self._backend.batch_get_v1(keys[:claimed], self._host.slots(range(claimed))) if claimed else []
        fetched = came.index(False) if False in came else len(came)
        time.sleep((PAGES - fetched) * PAGE_S)
        took_s = time.monotonic() - began_s
        if fetched < PAGES:
            self._backend.batch_set_v1(keys[fetched:], self._host.slots(range(fetched, PAGES)))
        return took_s, fetched

    def settle(self) -> None:
        assert self._backend.shelves["kv"].store.flush(60.0)

    def close(self) -> None:
        self._backend.close()


class _Computing(PagedEngine):
    """The stand-in for vLLM; what it computes takes time and is not looked at."""

    def _compute(self, request: Request, ids: list[int], count: int) -> None:
        time.sleep(count / BLOCK * PAGE_S)

    def holds(self, block_id: int, name: bytes) -> bool:
        return True


class Vllm:
    """vLLM's order of calls; see ``PagedEngine``."""

    page_bytes = PAGE_BYTES

    def __init__(self, options: dict[str, Any], name: str) -> None:
        given = read_options({"host_gb": 4 * PAGES * PAGE_BYTES / 1e9, "pool_gb": 0.01, **options})

        def tiers(layout: PageLayout) -> list[PageTier]:
            return open_tiers(given, layout)

        self._engine = _Computing(
            tiers,
            lookup=lambda layouts: open_lookup(given, layouts),
            worth=given.worth,
            load_s=given.allowance,
            weights=name,
        )

    def first_token(self, number: int) -> tuple[float, int]:
        request = Request(str(number), list(range(1000 * number, 1000 * number + PAGES * BLOCK + 1)))
        began_s = time.monotonic()
        served = self._engine.serve(request)
        return time.monotonic() - began_s, served.loaded

    def settle(self) -> None:
        self._engine.idle()

    def close(self) -> None:
        self._engine.close()


PLUGINS: dict[str, Callable[[dict[str, Any], str], Engine]] = {"sglang": Sglang, "vllm": Vllm}


def figures_of(
    make: Callable[[dict[str, Any], str], Engine], pace: float, patience: dict[str, float]
) -> dict[str, Any]:
    """Serve prompts from a pool of this pace, and as many with no pool, in turn."""
    with ExitStack() as stack:
        (port,) = free_ports(1)
        stack.enter_context(PoolServer(max_bytes=64 << 20, port=port))
        way = SlowWay(port)
        stack.callback(way.close)

        def opened(options: dict[str, Any]) -> Engine:
            engine = make(options, "bench")
            stack.callback(engine.close)
            return engine

        writer = opened({"pool": f"redis://127.0.0.1:{port}"})
        reader = opened({"pool": f"redis://127.0.0.1:{way.port}", **patience})
        alone = opened({})
        for number in range(PROMPTS):
            writer.first_token(number)
            writer.settle()
        for number in range(1000, 1003):  # they learn how fast they compute
            reader.first_token(number)
            alone.first_token(number)
        way.latency_s, way.bytes_per_s = LATENCY_S, reader.page_bytes / (pace * PAGE_S)
        with_pool = [(reader.first_token(number), alone.first_token(2000 + number)[0]) for number in range(PROMPTS)]
        way.latency_s, way.bytes_per_s = 0.0, None
    ours, theirs = [took_s for (took_s, _), _ in with_pool], [took_s for _, took_s in with_pool]
    return {
        "without a pool, ms": round(statistics.median(theirs) * 1e3, 1),
        "with it, median ms": round(statistics.median(ours) * 1e3, 1),
        "with it, worst ms": round(max(ours) * 1e3, 1),
        "prompts that took pages from it": sum(fetched > 0 for (_, fetched), _ in with_pool),
        "all of them, times without": round(sum(ours) / sum(theirs), 3),
    }


def main(argv: Sequence[str]) -> int:
    """Print the figures; 1 where the bar is missed."""
    arguments = argparse.ArgumentParser(prog="./bench slow_pool", description=__doc__.partition("\n")[0])
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args(argv)
    figures: dict[str, Any] = {}
    missed = []
    for (name, make), (patience, limits), pace in product(PLUGINS.items(), PATIENCE.items(), PACES):
        title = f"{name}, {patience}, pace {pace:g}"
        found = figures[title] = figures_of(make, pace, limits)
        print(f"{title}: {found}", flush=True)
        times = found["all of them, times without"]
        if times > MOST or (limits and pace < USED_BELOW and times > 1.0):
            missed.append(title)
    print(
        f"the bar was missed: {', '.join(missed)}" if missed else f"the bar holds: at most {MOST} times, at every pace"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures | {"missed": missed}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
