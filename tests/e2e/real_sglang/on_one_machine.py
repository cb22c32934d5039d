"""What the servers do by themselves: hits from every tier, isolation, restarts, a pool that is shared, slow or gone."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import redis

from kvstore.page import Tier
from kvstore.tiers.pool_server import PoolServer
from tests.e2e.real_sglang.checks import Checks
from tests.e2e.real_sglang.servers import Answer, PluginServer
from tests.samples.slow_way import SlowWay

PROMPT_TOKENS = 500
VOCABULARY = range(300, 2000)
PATIENCE_S = 90.0
DEADLINE_S = 1.0
_chance = random.Random(11)


def prompt(tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt that nobody has seen."""
    return [_chance.choice(VOCABULARY) for _ in range(tokens)]


def whole_pages(tokens: int, page: int) -> int:
    """Return how many tokens of a prompt can be cached: whole pages, and never the last token."""
    return (tokens - 1) // page * page


def same_output_from_every_tier(server: PluginServer, checks: Checks, seen: list[int]) -> Answer:
    """Cold, device, host, storage; then detached, attached, cleared."""
    cold = server.generate(seen)
    cached = whole_pages(len(seen), server.page)
    server.until_told(seen, Tier.DISK)
    server.until_told(seen, Tier.POOL)
    device = server.generate(seen)
    for _ in range(9):  # more than the device holds, less than device and host do
        server.generate(prompt(), new_tokens=1)
    host = server.generate(seen)
    server.flush()
    storage = server.generate(seen)
    checks.equal("cold: nothing was cached", cold.cached, 0)
    checks.equal("device hit", (device.device, device.output), (cached, cold.output))
    checks.true("host hit", host.host > 0 and host.storage == 0, f"{host}")
    checks.equal("host hit: the same output", host.output, cold.output)
    checks.equal("storage hit", (storage.storage, storage.output), (cached, cold.output))
    server.flush()
    salted = server.generate(seen, cache_salt="another tenant")
    checks.equal("another salt gets nothing", (salted.cached, salted.output), (0, cold.output))
    server.until_told(seen, Tier.DISK, salt="another tenant")
    server.flush()
    again = server.generate(seen, cache_salt="another tenant")
    checks.equal("the same salt gets its own", (again.storage, again.output), (cached, cold.output))
    return cold


def detached_and_attached(server: PluginServer, checks: Checks) -> None:
    """Storage goes and comes while the server runs; then everything is cleared."""
    fresh = prompt()
    cold = server.generate(fresh)
    server.until_told(fresh, Tier.DISK)
    server.detach()
    server.flush()
    without = server.generate(fresh)
    server.flush()
    server.attach()
    with_it = server.generate(fresh)
    checks.equal("detached: nothing is cached", (without.cached, without.output), (0, cold.output))
    checks.equal(
        "attached again: served from storage",
        (with_it.storage, with_it.output),
        (whole_pages(len(fresh), server.page), cold.output),
    )
    server.administer("/hicache/storage-backend/clear")
    server.flush()
    cleared = server.generate(fresh)
    checks.equal("cleared: nothing is cached", (cleared.cached, cleared.output), (0, cold.output))


def never_another_servers_page(other: PluginServer, checks: Checks, seen: Sequence[int], what: str) -> None:
    """A server that differs in one thing gets nothing of the first, and its own pages."""
    foreign = other.generate(seen)
    other.until_told(seen, Tier.DISK)
    other.flush()
    own = other.generate(seen)
    checks.equal(f"another {what} gets nothing", foreign.cached, 0)
    cached = whole_pages(len(seen), other.page)
    checks.equal(f"another {what} gets its own", (own.storage, own.output), (cached, foreign.output))


def shared_through_the_pool(one: PluginServer, other: PluginServer, checks: Checks) -> None:
    """What one server has computed, another one reads."""
    fresh = prompt()
    cold = one.generate(fresh)
    one.until_told(fresh, Tier.POOL)
    shared = other.generate(fresh)
    checks.equal(
        "another server reads it from the pool",
        (shared.storage, shared.output),
        (whole_pages(len(fresh), other.page), cold.output),
    )


def slow_pool_is_not_waited_for(one: PluginServer, other: PluginServer, way: SlowWay, checks: Checks) -> None:
    """What a slow pool holds is computed instead, once that is known; and fetched again when it is fast again."""
    for _ in range(3):  # it learns how fast it computes
        other.generate(prompt(), new_tokens=1)
    held = [prompt() for _ in range(16)]
    for each in held:
        one.generate(each, new_tokens=1)
    one.until_told(held[-1], Tier.POOL)
    fast_s = [other.generate(held.pop(), new_tokens=1).took_s for _ in range(3)]
    way.bytes_per_s, way.latency_s = 100_000.0, 0.02
    learning_s, refused_s, cold_s = [], [], []
    while held and len(refused_s) < 7:
        answer = other.generate(held.pop(), new_tokens=1)
        (learning_s if answer.storage else refused_s).append(answer.took_s)
        cold_s.append(other.generate(prompt(), new_tokens=1).took_s)  # in turn, so that both see the same machine
    checks.note("seconds for a prompt, computed", round(statistics.median(cold_s), 3))
    checks.note("seconds for a prompt, from a fast pool", round(statistics.median(fast_s), 3))
    checks.note("seconds for a prompt, from a slow pool while that is learned", [round(s, 3) for s in learning_s])
    checks.note("seconds for a prompt that a slow pool holds, computed", [round(s, 3) for s in refused_s])
    checks.true("a slow pool is no longer waited for", len(refused_s) >= 7, f"{len(refused_s)} of {len(learning_s)}")
    if refused_s:
        slowed = statistics.median(refused_s) / statistics.median(cold_s)
        checks.note("time of these prompts against computing with no pool", round(slowed, 2))
        checks.true("a slow pool makes the first token no later", slowed < 1.5, f"{slowed:.2f} times")
    way.bytes_per_s, way.latency_s = None, 0.0
    back = _until(lambda: _from_pool(one, other))
    checks.true("a pool that is fast again is used again", back, "it was not within the limit")


def _from_pool(one: PluginServer, other: PluginServer) -> bool:
    fresh = prompt()
    one.generate(fresh, new_tokens=1)
    one.until_told(fresh, Tier.POOL)
    return other.generate(fresh, new_tokens=1).storage > 0


def killed_and_served_from_disk(server: PluginServer, pool: PoolServer, checks: Checks, seen: list[int]) -> None:
    """After ``kill -9`` and a new start, with the pool silent; then the pool dies for good."""
    frozen = _pool_process(pool)
    cold = server.generate(seen)
    server.until_told(seen, Tier.DISK)
    server.stop(signal.SIGKILL)
    server.start()
    server.until_ready()
    with _stopped(frozen):
        served = server.generate(seen)
        checks.equal(
            "killed and started again: served from disk, with the pool silent",
            (served.storage, served.output),
            (whole_pages(len(seen), server.page), cold.output),
        )


def pool_stops(server: PluginServer, pool: PoolServer, checks: Checks) -> None:
    """A pool that falls silent in mid-run, dies, and comes back."""
    before = [server.generate(prompt()).took_s for _ in range(5)]
    with _stopped(_pool_process(pool)):
        silent = [server.generate(prompt()) for _ in range(5)]
    pool.stop()
    gone = [server.generate(prompt()) for _ in range(3)]
    usual = statistics.median(before)
    slowest = max(answer.took_s for answer in (*silent, *gone))
    checks.note("seconds for a prompt with a pool", round(usual, 3))
    checks.note("seconds for the slowest prompt with a silent or dead pool", round(slowest, 3))
    checks.true(
        "a silent or dead pool costs hits alone",
        slowest < 3 * max(before) + 2 * DEADLINE_S,
        f"{slowest:.2f} s against {max(before):.2f} s",
    )
    pool.start()


def _pool_process(pool: PoolServer) -> int:
    with redis.Redis.from_url(pool.url) as client:
        return int(client.info("server")["process_id"])


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True
