"""Limits under 10,000 requests at once from four processes, also across resets of their window, and when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.pool_server import PoolServer

ROOT = Path(__file__).parents[2]
REQUESTS, PROCESSES, LIMIT = 10_000, 4, 100


@pytest.fixture(params=["memory", "redis"])
def counts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        yield str(tmp_path / "limits.counts")
        return
    with PoolServer(max_bytes=32 << 20) as server:
        yield server.url


class Takers:
    """Processes that wait for the word, then all ask, then wait again with what they have under way."""

    def __init__(self, where: str, resource: str, *, window_s: int = 0, requests: int = REQUESTS) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.samples.limit_taker", where, resource, str(LIMIT),
                 str(requests // PROCESSES), str(worker), str(PROCESSES), str(window_s)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for worker in range(PROCESSES)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

    def admitted(self) -> Counter[int]:
        """Give the word, and return how many were admitted in each window."""
        for process in self.processes:
            self.tell(process)
        told: Counter[int] = Counter()
        for process in self.processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != b"done\n":
                told[int(line)] += 1
        return told

    @staticmethod
    def tell(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                self.tell(process)
            process.communicate(timeout=60)


@pytest.mark.requirement("R22")
def test_in_each_window_exactly_the_limit_is_admitted(counts: str) -> None:
    takers = Takers(counts, "requests", window_s=1)
    told = takers.admitted()
    takers.end()
    assert len(told) >= 3  # the window was reset under way
    assert set(sorted(told.values())[-2:]) == {LIMIT}
    assert max(told.values()) <= LIMIT


@pytest.mark.requirement("R22")
def test_never_more_at_once_than_the_limit_and_room_again_after_a_process_died(counts: str) -> None:
    takers = Takers(counts, "concurrency")
    assert takers.admitted() == {0: LIMIT}
    again = Takers(counts, "concurrency", requests=1000) if counts.startswith("unix") else None
    if again is not None:  # other replicas find no room while these live …
        assert again.admitted() == {}
        again.end()
    for process in takers.processes:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    if counts.startswith("unix"):
        return  # … and their counts go when they have said nothing for a while: see test_limits
    takers.end()
    again = Takers(counts, "concurrency")  # workers that came in the place of those
    assert again.admitted() == {0: LIMIT}
    again.end()
