"""``./bench doors``: what keys and limits cost a request: CPU in µs, the least of several runs; Redis's round trips."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from gateway.front import Headers
from gateway.identity import Caller, Key, KeyRing, digest_of, new_secret
from gateway.limits.limiter import Limiter, limit_headers
from gateway.limits.redis_counts import RedisCounts
from gateway.limits.rules import CountStore, Level, LimitRule, Resource
from gateway.limits.shared_counts import SharedCounts
from kvstore.tiers.pool_server import PoolServer
from tracing.record import Identity

KEYS, RUNS = 10_000, 7
RULES = (
    LimitRule(Level.KEY, "k", Resource.REQUESTS, 10**9),
    LimitRule(Level.KEY, "k", Resource.TOKENS, 10**12),
    LimitRule(Level.TEAM, "t/m", Resource.CONCURRENCY, 10**6),
)


def cpu_us(work: Callable[[], object], count: int) -> float:
    """Return the CPU time of one call, at best."""
    best = float("inf")
    for _ in range(RUNS):
        began = time.process_time()
        for _ in range(count):
            work()
        best = min(best, (time.process_time() - began) / count * 1e6)
    return best


async def cpu_us_of(work: Callable[[], Awaitable[object]], count: int) -> float:
    """Return the same of a coroutine, one at a time."""
    best = float("inf")
    for _ in range(RUNS):
        began = time.process_time()
        for _ in range(count):
            await work()
        best = min(best, (time.process_time() - began) / count * 1e6)
    return best


def authentication() -> float:
    """Look one key up among many."""
    secrets = [new_secret() for _ in range(KEYS)]
    callers = (Caller(Identity("t", "m", str(n)), is_salted=True) for n in range(KEYS))
    ring = KeyRing(Key(digest_of(secret), caller) for secret, caller in zip(secrets, callers, strict=True))
    headers = Headers({"authorization": f"Bearer {secrets[KEYS // 2]}", "host": "x"})
    return cpu_us(lambda: ring.authenticate(headers), 10_000)


async def passing(store: CountStore, count: int) -> tuple[float, float]:
    """Take under three rules and settle; then make the headers that tell of it."""
    await store.open()
    limiter = Limiter(store)

    async def one() -> None:
        (await limiter.enter(RULES, 500)).settle(300)

    each = await cpu_us_of(one, count)
    passage = await limiter.enter(RULES, 500)
    headers = cpu_us(lambda: limit_headers(passage.taken, time.time_ns()), 2000)
    passage.settle(0)
    await store.close()
    return each, headers


async def together(store: RedisCounts, at_once: int, rounds: int) -> tuple[float, int]:
    """Take and settle many at once; return CPU each and round trips."""
    await store.open()
    limiter = Limiter(store)

    async def one() -> None:
        (await limiter.enter(RULES, 500)).settle(300)

    await one()
    began, trips = time.process_time(), store.status.round_trips
    for _ in range(rounds):
        await asyncio.gather(*(one() for _ in range(at_once)))
    each = (time.process_time() - began) / (at_once * rounds) * 1e6
    trips = store.status.round_trips - trips
    await store.close()
    return each, trips


async def measured() -> dict[str, float]:
    """Return all figures."""
    figures = {f"authenticate, {KEYS} keys (us)": authentication()}
    with tempfile.TemporaryDirectory() as folder:
        for workers in (1, 4):
            store = SharedCounts(Path(folder) / str(workers), workers=workers)
            each, headers = await passing(store, 3000)
            figures[f"shared memory, 3 limits, {workers} workers (us)"] = each
            figures["headers of 3 limits (us)"] = headers
    with PoolServer(max_bytes=32 << 20) as server:
        each, trips = await together(RedisCounts(server.url, deadline_s=5.0), 250, 20)
    return figures | {"Redis, 3 limits, 250 at once (us)": each, "Redis, round trips of 10,000 calls": float(trips)}


def main(argv: Sequence[str]) -> int:
    """Print them."""
    parser = argparse.ArgumentParser(prog="./bench doors")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    figures = asyncio.run(measured())
    for name, figure in figures.items():
        print(f"{name:45} {figure:10.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2))
    return 0
