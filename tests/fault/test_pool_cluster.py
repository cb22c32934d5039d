"""A real cluster of three masters and their replicas: what happens to the pool while one of them dies."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import redis

from kvstore.breaker import BreakerOptions
from kvstore.deadline import Allowance
from kvstore.page import PageKey
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import CLUSTER_SLOTS, PoolOptions, key_slot
from tests.samples.pages import LAYOUT, buffers, page, page_data, strangers

MASTERS = 3
PAGES = strangers(24)
KEYS = [key for key, _ in PAGES]
RIGHT = [page_data(key) for key in KEYS]
OPTIONS = PoolOptions(
    read_s=Allowance(1.0), write_s=Allowance(2.0), breaker=BreakerOptions(first_probe_s=0.02, longest_probe_s=0.1)
)
PATIENCE_S = 60.0


@dataclass
class Node:
    """One server of the cluster."""

    server: PoolServer
    port: int

    def call(self, *words: str | int) -> object:
        with redis.Redis(port=self.port, socket_timeout=PATIENCE_S) as client:
            return client.execute_command(*words)

    def kill(self) -> None:
        with redis.Redis(port=self.port) as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return ports whose cluster buses, 10,000 above, are ports too."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            port = 20_000 + taken.getsockname()[1] % 20_000
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    return ports


@pytest.fixture
def cluster() -> Iterator[list[Node]]:
    """Three masters, then a replica of each."""
    with ExitStack() as stack:
        nodes = []
        for port in free_ports(2 * MASTERS):
            settings = {
                "cluster-enabled": "yes", "cluster-node-timeout": "1000", "cluster-config-file": f"nodes-{port}.conf",
                "cluster-replica-validity-factor": "0", "repl-diskless-sync-delay": "0",
            }  # fmt: skip
            server = PoolServer(max_bytes=32 << 20, port=port, settings=settings)
            nodes.append(Node(stack.enter_context(server), port))
        share = CLUSTER_SLOTS // MASTERS + 1
        for number, node in enumerate(nodes[:MASTERS]):
            node.call("CLUSTER", "ADDSLOTSRANGE", number * share, min((number + 1) * share, CLUSTER_SLOTS) - 1)
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        ids = [str(node.call("CLUSTER", "MYID"), "ascii") for node in nodes]
        until(lambda: all(b"cluster_known_nodes:6" in info(node) for node in nodes))
        for number, node in enumerate(nodes[MASTERS:]):
            node.call("CLUSTER", "REPLICATE", ids[number])
        until(lambda: all(b"cluster_state:ok" in info(node) for node in nodes))
        until(lambda: all(node.call("ROLE")[3] == b"connected" for node in nodes[MASTERS:]))
        yield nodes


def info(node: Node) -> bytes:
    answer = node.call("CLUSTER", "INFO")
    return answer if isinstance(answer, bytes) else str(answer).replace("'", "").replace(": ", ":").encode()


def until(condition: object) -> None:
    """Ask again until it holds: the cluster's own agreement takes its own time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the cluster did not get there"


def reads(tier: PoolTier, keys: list[PageKey]) -> list[bytes | None]:
    out = buffers(len(keys))
    return [bytes(b) if found is not None else None for b, found in zip(out, tier.get(keys, out), strict=True)]


def test_a_master_that_dies_costs_its_pages_until_its_replica_has_taken_over(cluster: list[Node]) -> None:
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster)
    tier = PoolTier(LAYOUT, url, capacity_bytes=64 * LAYOUT.page_bytes, options=OPTIONS)
    assert all(tier.put([page(entry) for entry in PAGES]))
    assert reads(tier, KEYS) == RIGHT
    assert len(tier._server._servers.masters()) == MASTERS
    for node in cluster[:MASTERS]:
        node.call("WAIT", 1, int(PATIENCE_S * 1000))
    cluster[0].kill()
    during = reads(tier, KEYS)
    assert [read for key, read in zip(KEYS, during, strict=True) if read not in (None, page_data(key))] == []
    assert None in during
    written = tier.put([page(entry) for entry in PAGES])
    assert len(written) == len(PAGES)
    until(lambda: reads(tier, KEYS) == RIGHT)  # by itself, from the replica
    newcomers = strangers(12, first_token=90_000)
    assert all(tier.put([page(entry) for entry in newcomers]))
    assert reads(tier, [key for key, _ in newcomers]) == [page_data(key) for key, _ in newcomers]
    assert tier.stats().alarms == {}
    tier.close()


def test_slots_that_moved_are_followed(cluster: list[Node]) -> None:
    tier = PoolTier(
        LAYOUT, f"redis+cluster://127.0.0.1:{cluster[1].port}", capacity_bytes=64 * LAYOUT.page_bytes, options=OPTIONS
    )
    assert tier.exists(KEYS) == [False] * len(KEYS)
    giver, taker = cluster[0], cluster[1]
    slot = next(slot for key in KEYS if (slot := key_slot(tier._name(key))) < CLUSTER_SLOTS // MASTERS)
    taker_id = str(taker.call("CLUSTER", "MYID"), "ascii")
    for node in (taker, giver, cluster[2]):
        node.call("CLUSTER", "SETSLOT", slot, "NODE", taker_id)
    assert all(tier.put([page(entry) for entry in PAGES]))
    assert reads(tier, KEYS) == RIGHT
    assert tier.breaker.closed
    tier.close()


def test_a_key_is_in_the_slot_that_servers_put_it_in(cluster: list[Node]) -> None:
    for name in (b"", b"123456789", b"keepwarm:00:ff"):
        assert cluster[0].call("CLUSTER", "KEYSLOT", name) == key_slot(name)
