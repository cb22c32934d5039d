"""Budgets under 10,000 requests at once from four processes, with the store whole, and killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from redis import Redis

from billing.budget_redis import RedisBudgetStore
from billing.budgets import Budgets, Policy, Window
from billing.calendar import HOUR_NS
from billing.errors import BudgetExceeded
from engine_adapter.embedded.launch import free_port
from kvstore.tiers.pool_server import PoolServer
from tests.samples.budget_spender import LIMIT, ONE_CALL, WHO, budget

ROOT = Path(__file__).parents[2]
FIRST_NS = Window.HOUR.around(1_795_000_000 * 10**9)[0]
BEFORE_AND_AFTER_RESET = (FIRST_NS + HOUR_NS - 1, FIRST_NS + HOUR_NS)
REQUESTS, PROCESSES = 10_000, 4


class Spenders:
    """Four processes that wait for the word and then all ask."""

    def __init__(self, where: str, policy: str, instants: tuple[int, ...], requests: int = REQUESTS) -> None:
        words = [sys.executable, "-m", "tests.samples.budget_spender", where, policy, ",".join(map(str, instants))]
        self.processes = [
            subprocess.Popen(
                [*words, str(requests // PROCESSES)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(PROCESSES)
        ]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

    def go(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()

    def admitted(self) -> Counter[tuple[int, str]]:
        told: Counter[tuple[int, str]] = Counter()
        for process in self.processes:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0
            for line in output.decode().splitlines():
                instant, word = line.split()
                told[int(instant), word] += 1
        return told


def test_a_file_admits_exactly_the_limit_in_each_window(tmp_path: Path) -> None:
    spenders = Spenders(str(tmp_path / "budgets.sqlite3"), "deny", BEFORE_AND_AFTER_RESET)
    spenders.go()
    assert spenders.admitted() == {(at_ns, "counted"): LIMIT for at_ns in BEFORE_AND_AFTER_RESET}


def test_redis_admits_exactly_the_limit_in_each_window() -> None:
    with PoolServer(max_bytes=32 << 20) as server:
        spenders = Spenders(server.url, "deny", BEFORE_AND_AFTER_RESET)
        spenders.go()
        assert spenders.admitted() == {(at_ns, "counted"): LIMIT for at_ns in BEFORE_AND_AFTER_RESET}


@pytest.mark.parametrize(("policy", "requests"), [("deny", REQUESTS), ("admit", 2000)])
def test_redis_killed_in_the_middle_and_back_empty(policy: str, requests: int) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    with PoolServer(max_bytes=32 << 20, port=port), Redis.from_url(url) as client:
        spenders = Spenders(url, policy, (FIRST_NS,), requests)
        pid = int(client.info("server")["process_id"])
        spenders.go()
        counted = 0
        while counted < LIMIT // 4:
            counted = int(client.hget(f"{{keepwarm-budgets}}:{FIRST_NS}:calls|research", "used") or 0)
        os.kill(pid, signal.SIGKILL)
    with PoolServer(max_bytes=32 << 20, port=port):
        told = spenders.admitted()
    assert LIMIT // 4 <= told[FIRST_NS, "counted"] <= LIMIT
    if policy == "deny":
        assert told[FIRST_NS, "uncounted"] == 0
    else:
        assert told[FIRST_NS, "uncounted"] > 0


@pytest.mark.requirement("R17")
async def test_a_silent_redis_is_waited_for_once_however_many_ask() -> None:
    """Whoever has one of the few connections waits for the deadline; the others hear of it, and nobody asks again."""
    asked = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while data := await reader.read(1 << 16):
            asked += data.count(b"EVALSHA") + data.count(b"GET") - data.count(b"HMGET")
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisBudgetStore(f"redis://127.0.0.1:{port}?protocol=2", timeout_s=0.1)
    budgets = Budgets([budget(Policy.DENY)], store)
    answers = await asyncio.gather(
        *(budgets.admit(WHO, ONE_CALL, FIRST_NS) for _ in range(500)), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {BudgetExceeded}
    assert asked <= 8
    before = asked
    for _ in range(50):
        with pytest.raises(BudgetExceeded):
            await budgets.admit(WHO, ONE_CALL, FIRST_NS)
    assert asked == before
    await store.close()
    server.close()
