"""A host tier shared by processes: whoever is killed, nobody reads a wrong byte and nothing stays taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.breaker import BreakerOptions
from kvstore.deadline import Allowance
from kvstore.errors import MediumError
from kvstore.page import PageKey, Tier
from kvstore.page_store import PageStore, PageStoreOptions
from kvstore.shared_host import SharedHost
from kvstore.tiers.base import PagesRemoved, PagesStored, TierChange
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.shared_client import SharedHostOptions
from kvstore.tiers.shared_host import SharedHostTier
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data, strangers
from tests.samples.shared_host_client import STAGES

PAGES = 8
EAGER = SharedHostOptions(ask_s=Allowance(60.0), breaker=BreakerOptions(first_probe_s=0.01, longest_probe_s=0.05))
CHAIN = chain(4)
KEYS = [key for key, _ in CHAIN]


class Daemon:
    """What ``keepwarm store serve-host`` runs, in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        code = "import sys, pathlib, kvstore.shared_host as s; s.serve_until_told(pathlib.Path(sys.argv[1]), 10**7)"
        words = [sys.executable, "-c", code, str(self.path)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "a host tier of 0.01 GB" in self.process.stdout.readline()

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    started = Daemon(tmp_path / "host.sock")
    yield started
    if started.process.poll() is None:
        started.kill()


def opened(path: Path, options: SharedHostOptions = EAGER, **more: object) -> SharedHostTier:
    return SharedHostTier(LAYOUT, path, capacity_bytes=PAGES * LAYOUT.page_bytes, options=options, **more)


def reads(tier: SharedHostTier, keys: list[PageKey]) -> list[bytes | None]:
    out = buffers(len(keys))
    return [bytes(b) if found is not None else None for b, found in zip(out, tier.get(keys, out), strict=True)]


def test_engines_share_pages_and_changes_and_the_next_one_finds_them(daemon: Daemon) -> None:
    changes: list[TierChange] = []
    first, second = opened(daemon.path), opened(daemon.path, on_change=changes.append)
    assert first.put([page(entry) for entry in CHAIN]) == [True] * 4
    assert reads(second, KEYS) == [page_data(key) for key in KEYS]
    assert changes == [PagesStored(Tier.HOST, tuple(CHAIN))]
    assert second.put([page(entry) for entry in CHAIN]) == [True] * 4
    assert second.stats().puts == 0
    first.remove(KEYS[3:])
    assert second.exists(KEYS) == [True] * 3 + [False]
    assert changes[-1] == PagesRemoved(Tier.HOST, (KEYS[3],))
    first.close()
    second.close()
    third = opened(daemon.path)
    assert reads(third, KEYS[:3]) == [page_data(key) for key in KEYS[:3]]
    third.close()
    assert daemon.kill(signal.SIGTERM) == 0
    assert not daemon.path.exists()


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_engine_leaves_nothing_taken_and_nothing_wrong(daemon: Daemon, stage: str) -> None:
    tier = opened(daemon.path)
    command = [sys.executable, "-m", "tests.samples.shared_host_client", str(daemon.path), str(PAGES), stage]
    engine = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (engine.returncode, engine.stdout) == (-signal.SIGKILL, "ready\n")
    entries = strangers(PAGES)
    keys = [key for key, _ in entries]
    assert reads(tier, keys) == [page_data(key) for key in keys[:-2]] + [None] * 2
    newcomers = strangers(PAGES, first_token=500_000)
    while not all(tier.put([page(entry) for entry in newcomers])):
        pass  # until the daemon has noticed
    assert reads(tier, [key for key, _ in newcomers]) == [page_data(key) for key, _ in newcomers]
    assert tier.stats().alarms == {}
    tier.check()
    tier.close()


def test_a_killed_daemon_is_a_miss_at_once_and_its_successor_is_used(daemon: Daemon) -> None:
    changes: list[TierChange] = []
    tier = opened(daemon.path, on_change=changes.append)
    assert all(tier.put([page(entry) for entry in CHAIN]))
    loan = tier.lend(KEYS[:2])
    daemon.kill()
    assert reads(tier, KEYS) == [None] * 4
    assert not tier.breaker.closed
    assert changes[-1] == PagesRemoved(Tier.HOST, tuple(KEYS))
    assert tier.put([page(entry) for entry in CHAIN]) == [False] * 4
    assert (tier.exists(KEYS), tier.pin(KEYS), list(tier.scan())) == ([False] * 4, [False] * 4, [])
    assert [bytes(each.data) for each in loan.pages] == [page_data(key) for key in KEYS[:2]]  # it is still mapped
    daemon.start()
    assert tier.breaker.wait_closed(60)
    assert reads(tier, KEYS) == [None] * 4
    assert all(tier.put([page(entry) for entry in CHAIN]))
    tier.take_back(loan)  # of the one before: not this one's
    assert reads(tier, KEYS) == [page_data(key) for key in KEYS]
    assert tier.stats().alarms == {}
    tier.check()
    tier.close()


def test_a_daemon_that_hangs_costs_one_deadline(daemon: Daemon) -> None:
    short = SharedHostOptions(ask_s=Allowance(0.2), breaker=BreakerOptions(first_probe_s=3600.0))
    tier = opened(daemon.path, short)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED)
    assert reads(tier, KEYS) == [None] * 4
    assert not tier.breaker.closed
    assert reads(tier, KEYS) == [None] * 4
    assert tier.stats().misses == {"unavailable": 8}
    os.kill(daemon.process.pid, signal.SIGCONT)
    tier.close()


def test_a_store_writes_behind_out_of_shared_memory(daemon: Daemon, tmp_path: Path) -> None:
    disk = DiskTier(LAYOUT, tmp_path / "disk", capacity_bytes=16 * LAYOUT.page_bytes)
    store = PageStore([opened(daemon.path), disk], PageStoreOptions(get_s=Allowance(60.0)))
    assert all(store.put([page(entry) for entry in CHAIN]))
    assert store.flush(60)
    assert disk.exists(KEYS) == [True] * 4
    daemon.kill()
    out = buffers(4)
    assert store.get(KEYS, out) == [Tier.DISK] * 4
    assert [bytes(buffer) for buffer in out] == [page_data(key) for key in KEYS]
    store.close()


def test_engines_start_without_a_daemon_and_a_second_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    early = opened(path)
    assert early.put([page(CHAIN[0])]) == [False]
    daemon = Daemon(path)
    assert early.breaker.wait_closed(60)
    assert early.put([page(CHAIN[0])]) == [True]
    with pytest.raises(MediumError, match="cannot serve"):
        SharedHost(path, capacity_bytes=1 << 20)
    other = SharedHostTier(LAYOUT, path, capacity_bytes=1 << 30, options=EAGER)
    assert other.capacity_bytes == early.capacity_bytes  # the first engine of a layout says how much
    for tier in (early, other):
        tier.close()
    daemon.kill()
