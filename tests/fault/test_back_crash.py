"""A crash takes of a store that writes back what no flush has promised, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from kvstore.deadline import Allowance
from kvstore.tiers.disk import DiskOptions, DiskTier
from tests.samples.pages import LAYOUT, buffers, chain, page_data


def test_what_was_flushed_is_there_and_what_was_kept_back_is_a_miss(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.samples.back_writer", str(tmp_path)]
    assert subprocess.run(command, timeout=100, check=False).returncode == -signal.SIGKILL
    options = DiskOptions(read_s=Allowance(60.0))
    tier = DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * LAYOUT.page_bytes, options=options)
    keys, out = [key for key, _ in chain(7)], buffers(7)
    assert [found is not None for found in tier.get(keys, out)] == [True] * 4 + [False] * 3
    assert [bytes(buffer) for buffer in out[:4]] == [page_data(key) for key in keys[:4]]
    assert tier.stats().alarms == {}
    tier.close()
