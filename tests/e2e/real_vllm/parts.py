"""What is tried, part by part. Each appends to the agents' rows and returns what it found wrong."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import redis

from kvstore.tiers.pool_server import PoolServer
from tests.e2e.real_sglang_index.processes import Json
from tests.e2e.real_vllm.agents import RED_SALT, Agents, Row
from tests.e2e.real_vllm.processes import VllmServer
from tests.samples.slow_way import SlowWay

Faults = list[str]
MakeServer = Callable[..., VllmServer]
PATIENCE_S = 90.0


@dataclass
class Lives:
    """What the servers counted, all their lives together."""

    ended: dict[str, list[dict[str, int]]] = field(default_factory=dict)

    def end(self, server: VllmServer) -> None:
        """Take a server's counters before it is killed."""
        self.ended.setdefault(server.name, []).append(server.counters())

    def sums(self, server: VllmServer) -> dict[str, int]:
        """Return the sums with the life that it is in."""
        lives = [*self.ended.get(server.name, []), server.counters()]
        return {name: sum(life.get(name, 0) for life in lives) for name in sorted({n for life in lives for n in life})}


def _expect(holds: bool, what: str) -> Faults:
    return [] if holds else [what]


def _same(rows: list[Row], what: str) -> Faults:
    return _expect(len({row.text for row in rows}) == 1, f"{what}: the answers differ: {[row.text for row in rows]}")


def tiers(agents: Agents, server: VllmServer, talk: list[Json]) -> Faults:
    """Cold, from the device, from memory once the device has given pages up, from disk once memory has.

    Memory keeps what is worth most, not what came last: a few pages may come from disk before it is full. What the
    device still holds comes from there: each tier gives what was predicted of it.
    """
    agents.part = "one server: cold, device, host and disk"
    agents.only(server.name)
    cold, device = agents.chat(talk), agents.chat(talk)
    others = [agents.prompt(f"passer-by {number}") for number in range(60)]
    first = agents.chat(others[0])
    for other in others[1:44]:  # more than the device holds, less than memory does
        agents.chat(other)
    before = server.counters()
    host = agents.chat(talk)
    between = server.counters()
    for other in others[44:]:  # more than memory holds
        agents.chat(other)
    disk = agents.chat(others[0])
    after = server.counters()
    first_rise = {name: between[f"cached_{name}"] - before[f"cached_{name}"] for name in ("device", "host", "disk")}
    expected = {name: host.predicted_tiers[name] for name in first_rise}
    from_disk = after["cached_disk"] - between["cached_disk"]
    return [
        *_expect(cold.reported == first.reported == 0, f"the first request hit {cold.reported}"),
        *_expect(device.reported > 0, "no hit in the device"),
        *_expect(first_rise == expected, f"{first_rise} were read where {expected} were predicted"),
        *_expect(sum(expected.values()) == host.reported == device.reported, f"{expected} of {host.reported}"),
        *_expect(first_rise["host"] > 0, "nothing came from host"),
        *_expect(0 < from_disk <= disk.reported, f"{from_disk} of {disk.reported} came from disk"),
        *_same([cold, device, host], "after device and host hits"),
        *_same([first, disk], "after a disk hit"),
    ]


def salts(agents: Agents, talk: list[Json]) -> Faults:
    """Another tenant, and a salt of the client's own."""
    agents.part = "another tenant, another salt"
    blue, again = agents.chat(talk, "blue"), agents.chat(talk, "blue")
    own, own_again = agents.chat(talk, cache_salt="own"), agents.chat(talk, cache_salt="own")
    return [
        *_expect(blue.reported == 0, f"another tenant hit {blue.reported} tokens"),
        *_expect(own.reported == 0, f"another salt hit {own.reported} tokens"),
        *_expect(min(again.reported, own_again.reported) > 0, "no hit within a salt"),
        *_same([blue, again, own, own_again], "under salts"),
    ]


def pool(agents: Agents, other: VllmServer, talk: list[Json], cold: Row) -> Faults:
    """A server that never saw the talk has it from the pool."""
    agents.part = "another server: the pool"
    agents.only(other.name)
    before = other.counters()
    row = agents.chat(talk)
    pooled = other.counters()["cached_external_unspecified"] - before["cached_external_unspecified"]
    green = agents.chat(talk, cache_salt="a salt that nobody has used")
    return [
        *_expect(green.reported == 0, f"another salt hit {green.reported} tokens on another server"),
        *_same([row, green], "under another salt"),
        *_expect(pooled > 0, "nothing came from the pool"),
        *_expect(row.predicted_tiers["pool"] > 0, "the index did not know of the pool's pages"),
        *_same([cold, row], "from the pool"),
    ]


def strangers(make: MakeServer, other_model: object, store: Json, talk: list[Json]) -> tuple[Faults, Json]:
    """Servers that differ in one thing, over the same folder and pool, never get a page; one that doesn't gets all."""
    kinds: dict[str, Json] = {
        "nothing": {},
        "dtype": {"dtype": "bfloat16"},
        "block size": {"block": 64},
        "weights under the same name": {"model": other_model},
        "served name": {"served": "other"},
    }
    cached: Json = {}
    waves = [list(kinds.items())[start : start + 2] for start in range(0, len(kinds), 2)]  # more are too much memory
    for wave in waves:
        servers = {kind: make(name=f"stranger-{kind.split()[0]}", store=store, **more) for kind, more in wave}
        try:
            for server in servers.values():
                server.start()
            for kind, server in servers.items():
                server.until_ready()
                more = {"model": "other"} if kind == "served name" else {}
                cached[kind] = [server.cached(talk, cache_salt=RED_SALT, **more) for _ in range(2)]
        finally:
            for server in servers.values():
                server.stop(signal.SIGKILL)
    twin = cached["nothing"]
    faults = _expect(
        min(twin) > 0, f"a server that differs in nothing hit {twin}: that others hit nothing shows nothing"
    )
    faults += [
        f"another {kind}: hit {first}, then {again}"
        for kind, (first, again) in cached.items()
        if kind != "nothing" and (first or not again)
    ]
    return faults, cached


def slow_pool(make: MakeServer, agents: Agents, pool: PoolServer, port: int) -> tuple[Faults, Json]:
    """What a slow pool holds is computed instead, once that is known; and loaded again when it is fast again."""
    way = SlowWay(port)
    common: Json = {"host_gb": 0.004, "pool_gb": 0.4}
    patient: Json = {"deadline_ms": 10_000, "least_mb_per_s": 0.02, "claim_margin": 0.25}  # slow is not broken
    one = make(name="one", store={**common, "pool": f"redis://127.0.0.1:{port}"})
    other = make(name="other", store={**common, **patient, "pool": f"redis://127.0.0.1:{way.port}"})
    try:
        for server in (one, other):
            server.start()
        for server in (one, other):
            server.until_ready()
        for number in range(3):  # it learns how fast it computes
            other.ask(agents.prompt(f"learning {number}"), max_tokens=1)
        held = [agents.prompt(f"held {number}") for number in range(16)]
        _hold(one, held, pool)
        fast = [_timed(other, held.pop()) for _ in range(3)]
        way.bytes_per_s, way.latency_s = 100_000.0, 0.02
        learning, refused, cold = list[float](), list[float](), list[float]()
        while held and len(refused) < 8:
            took_s, cached = _timed(other, held.pop())
            (learning if cached else refused).append(took_s)
            cold.append(_timed(other, agents.prompt("in turn, so that both see the same machine"))[0])
        way.bytes_per_s, way.latency_s = None, 0.0
        is_back = _is_used_again(one, other, agents, pool)
    finally:
        for server in (one, other):
            server.stop(signal.SIGKILL)
        way.close()
    slowed = statistics.median(refused) / statistics.median(cold) if refused else float("inf")
    figures: Json = {
        "computed, s": round(statistics.median(cold), 3),
        "from a fast pool, s": round(statistics.median(took_s for took_s, _ in fast), 3),
        "from a slow pool, while that was learned, s": [round(each, 3) for each in learning],
        "what a slow pool holds, computed, s": [round(each, 3) for each in refused],
        "times of computing": round(slowed, 2),
    }
    return [
        *_expect(all(cached > 0 for _, cached in fast), f"a fast pool was not used: {fast}"),
        *_expect(len(refused) >= 8, f"a slow pool was waited for {len(learning)} times"),
        *_expect(slowed < 1.5, f"a slow pool makes the first token later: {slowed:.2f} times"),
        *_expect(is_back, "a pool that was fast again was not used again"),
    ], figures


def _timed(server: VllmServer, messages: list[Json]) -> tuple[float, int]:
    """Return the seconds until the one token asked for, and the tokens that were cached."""
    began_s = time.monotonic()
    cached = server.cached(messages, max_tokens=1)
    return time.monotonic() - began_s, cached


def _hold(server: VllmServer, prompts: list[list[Json]], pool: PoolServer) -> None:
    """Have a server compute prompts, and wait until the pool has their pages: nothing new comes any more."""
    for each in prompts:
        server.ask(each, max_tokens=1)
    with redis.Redis.from_url(pool.url) as client:
        before = -1
        while (now := client.dbsize()) != before:
            before = now
            time.sleep(1.0)


def _is_used_again(one: VllmServer, other: VllmServer, agents: Agents, pool: PoolServer) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        fresh = agents.prompt("is it fast again?")
        _hold(one, [fresh], pool)
        if _timed(other, fresh)[1]:
            return True
    return False


def ten_steps(agents: Agents, first: VllmServer, second: VllmServer, lives: Lives) -> Faults:
    """An agent's run of ten steps, in the midst of which one server is killed and later replaced."""
    agents.part = "a run of ten steps, one server killed and replaced"
    messages, rows = agents.prompt("the run"), list[Row]()
    agents.only(first.name)
    rows += [agents.step(messages) for _ in range(4)]
    agents.only(None)
    lives.end(first)
    first.stop(signal.SIGKILL)
    agents.until(first.name, healthy=False)
    rows += [agents.step(messages) for _ in range(3)]
    first.start()
    first.until_ready()
    agents.until(first.name, healthy=True)
    agents.settle()
    told = agents.gateway.instances()[first.name]
    agents.only(first.name)
    rows += [agents.step(messages) for _ in range(3)]
    counted = first.counters()
    return [
        *_expect([row.instance for row in rows[4:7]] == [second.name] * 3, "the second did not take over"),
        *_expect(all(row.reported > 0 for row in rows[1:]), f"hits: {[row.reported for row in rows]}"),
        *_expect(rows[4].predicted_tiers["pool"] > 0, "the second had nothing from the pool"),
        *_expect(counted["cached_disk"] > 0, f"the replaced server read nothing from disk: {counted}"),
        *_expect(counted["cached_external_unspecified"] > 0, f"… and nothing from the pool: {counted}"),
        *_expect(told["events"] == "complete", f"the replaced server's events are {told['events']}"),
    ]


def _kill(server: PoolServer) -> None:
    """End the server as a crash would; ``restart`` brings it back, empty."""
    assert server._process is not None
    os.killpg(server._process.pid, signal.SIGKILL)
    server._process.wait()


def redis_stopped(
    agents: Agents, servers: list[VllmServer], server: PoolServer, talk: list[Json]
) -> tuple[Faults, Json]:
    """The pool goes away in the middle of traffic and comes back; answers and hits of other tiers stay."""
    agents.part = "Redis stopped in mid-run"
    faults: Faults = []
    waits: Json = {}
    agents.only(servers[0].name)
    known = [agents.chat(talk)]
    new = agents.prompt("while it is away")
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(agents.chat, agents.prompt(f"busy {n}"), settled=False) for n in range(4)]
        _kill(server)
        for each in running:
            each.result()
    began = time.monotonic()
    for each in servers:
        agents.only(each.name)
        began = time.monotonic()
        known.append(agents.chat(talk, settled=False))
        waits[f"{each.name}: first answer after it stopped, s"] = round(time.monotonic() - began, 3)
        cold, again = agents.chat(new, settled=False), agents.chat(new, settled=False)
        faults += _expect(again.reported > 0, f"{each.name} without the pool: no hit in its own tiers")
        faults += _same([cold, again], f"{each.name} without the pool")
    faults += _same(known, "without the pool")
    server.restart()
    time.sleep(10)  # until the breakers have probed it: at most 8 s apart
    agents.part = "Redis back"
    agents.only(servers[0].name)
    fresh = agents.prompt("after it came back")
    first = agents.chat(fresh)
    agents.only(servers[1].name)
    agents.settle()
    second = agents.chat(fresh)
    faults += _expect(second.reported > 0, "nothing is shared through the pool that came back")
    return faults + _same([first, second], "through the pool that came back"), waits
