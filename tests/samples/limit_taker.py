"""A process that asks for many requests at once and tells each that was admitted.

``python -m tests.samples.limit_taker STORE RESOURCE LIMIT COUNT WORKER WORKERS WINDOW_S``: the store is a Redis URL
or a file. With a window it goes on for so long that the window changes several times. Each line is the start of the
window that an admitted request was counted in, 0 for requests at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from gateway.limits.limiter import Limited, Limiter
from gateway.limits.redis_counts import RedisCounts
from gateway.limits.rules import CountStore, Level, LimitRule, Outage, Resource
from gateway.limits.shared_counts import SharedCounts

AT_ONCE = 250


def rule(resource: str, limit: int) -> LimitRule:
    """Return the rule that all processes ask under."""
    return LimitRule(Level.KEY, "k", Resource(resource), limit, Outage.DENY)


async def take(store: CountStore, one: LimitRule, count: int, go_on_until: float) -> None:
    """Ask ``count`` times, many at once, and then on until the given moment."""
    await store.open()
    limiter = Limiter(store)
    os.write(1, b"ready\n")
    await asyncio.to_thread(sys.stdin.readline)

    async def ask() -> None:
        try:
            passage = await limiter.enter([one], 1)
        except Limited:
            return
        os.write(1, b"%d\n" % passage.taken[0].start_ns)

    asked = 0
    while asked < count or time.time() < go_on_until:
        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        asked += AT_ONCE
    os.write(1, b"done\n")
    await asyncio.to_thread(sys.stdin.readline)  # what is under way stays under way until all have asked
    await store.close()


def main(where: str, resource: str, limit: str, count: str, worker: str, workers: str, window_s: str) -> None:
    """Run it."""
    window = int(window_s)
    store: CountStore
    if where.startswith(("redis", "unix")):
        store = RedisCounts(where, deadline_s=5.0, window_s=window or 60)
    else:
        store = SharedCounts(
            Path(where), worker=int(worker), workers=int(workers), deadline_s=5.0, window_s=window or 60
        )
    asyncio.run(take(store, rule(resource, int(limit)), int(count), time.time() + 2.5 * window if window else 0.0))


if __name__ == "__main__":
    main(*sys.argv[1:])
