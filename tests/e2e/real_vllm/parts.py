"""What is tried, part by part. Each appends to the agents' rows and returns what it found wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.tiers.pool_server import PoolServer
from tests.e2e.real_sglang_index.processes import Json
from tests.e2e.real_vllm.agents import Agents, Row
from tests.e2e.real_vllm.processes import VllmServer

Faults = list[str]
MakeServer = Callable[..., VllmServer]


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
    """One server: cold, from the device, and from host or disk once the device has given the pages up."""
    agents.part = "one server: cold, device, host and disk"
    agents.only(server.name)
    cold, device = agents.chat(talk), agents.chat(talk)
    before = server.counters()
    for number in range(24):
        agents.chat(agents.prompt(f"passer-by {number}"))
    stored = agents.chat(talk)
    after = server.counters()
    fetched = sum(after[name] - before[name] for name in ("cached_host", "cached_disk"))
    return [
        *_expect(cold.reported == 0, f"the first request hit {cold.reported}"),
        *_expect(device.reported > 0, "no hit in the device"),
        *_expect(stored.reported == device.reported, f"{stored.reported} from storage, {device.reported} from device"),
        *_expect(fetched > 0, "nothing came from host or disk"),
        *_same([cold, device, stored], "after device and storage hits"),
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
    """Servers that differ in one thing, over the same folder and pool, never get a page."""
    kinds: dict[str, Json] = {
        "dtype": {"dtype": "bfloat16"},
        "block size": {"block": 64},
        "weights under the same name": {"model": other_model},
        "served name": {"served": "other"},
    }
    cached: Json = {}
    for some in (dict(list(kinds.items())[:2]), dict(list(kinds.items())[2:])):
        servers = {kind: make(name=f"stranger-{kind.split()[0]}", store=store, **more) for kind, more in some.items()}
        try:
            for server in servers.values():
                server.start()
            for kind, server in servers.items():
                server.until_ready()
                more = {"model": "other"} if kind == "served name" else {}
                asked = [server.ask(talk, **more)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
                cached[kind] = asked
        finally:
            for server in servers.values():
                server.stop(signal.SIGKILL)
    faults = [
        f"another {kind}: hit {first}, then {again}" for kind, (first, again) in cached.items() if first or not again
    ]
    return faults, cached


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
