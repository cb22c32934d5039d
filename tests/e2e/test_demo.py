"""The main job as a user starts it: ``keepwarm demo`` in a process of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from billing.ledger_read import LedgerReader
from gateway.demo.summary import TWIN_MIN_PROMPT_TOKENS
from tests.samples.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

PAGE = 16
STEP_KEYS = {
    "step", "instance", "prompt_tokens", "hit_tokens", "output_tokens", "ttft_ms", "cold_ttft_ms", "cost_nano",
    "saved_nano", "tool_calls",
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], str, Path]]:
    """Run the demonstration once; yield its summary, what it printed, and its folder with two disk tiers of 1 GiB."""
    folder = tmp_path_factory.mktemp("stage") / "demo"
    command = [
        sys.executable,
        "-m",
        "gateway",
        "demo",
        "--folder",
        str(folder),
        "--json",
        str(folder.parent / "s.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    yield json.loads((folder.parent / "s.json").read_text()), done.stdout, folder
    shutil.rmtree(folder)


def test_its_last_lines_are_the_summary(demo: tuple[dict[str, Any], str, Path]) -> None:
    summary, printed, _ = demo
    assert json.loads(printed[printed.index("\n{\n") :]) == summary
    assert set(summary) == {"model", "run", "steps", "restart_step", "new_instance_step", "totals"}
    for step in (*summary["steps"], summary["restart_step"], summary["new_instance_step"]):
        assert set(step) == STEP_KEYS


def test_every_step_hits_its_predecessor_and_each_tier_is_shown(demo: tuple[dict[str, Any], str, Path]) -> None:
    summary, _, _ = demo
    steps = [*summary["steps"], summary["restart_step"], summary["new_instance_step"]]
    for before, step in pairwise(steps):
        assert sum(step["hit_tokens"].values()) >= before["prompt_tokens"] // PAGE * PAGE
    assert all(step["hit_tokens"]["device"] for step in summary["steps"][1:])
    assert summary["restart_step"]["hit_tokens"]["disk"] >= steps[-3]["prompt_tokens"] // PAGE * PAGE
    assert summary["restart_step"]["instance"] == summary["steps"][-1]["instance"]
    assert summary["new_instance_step"]["hit_tokens"]["pool"] >= steps[-2]["prompt_tokens"] // PAGE * PAGE
    assert summary["new_instance_step"]["instance"] != summary["restart_step"]["instance"]


def test_each_long_prompt_has_a_cold_twin(demo: tuple[dict[str, Any], str, Path]) -> None:
    summary, _, _ = demo
    for step in (*summary["steps"], summary["restart_step"], summary["new_instance_step"]):
        assert step["ttft_ms"] > 0
        assert (step["cold_ttft_ms"] is not None) == (step["prompt_tokens"] >= TWIN_MIN_PROMPT_TOKENS)


def test_its_totals_are_the_ledgers(demo: tuple[dict[str, Any], str, Path]) -> None:
    summary, _, folder = demo
    steps = [*summary["steps"], summary["restart_step"], summary["new_instance_step"]]
    with LedgerReader(folder / "home" / "ledger.sqlite3") as ledger:
        rows = [row for row in ledger.rows() if row.run_id == summary["run"]]
    assert len(rows) == len(steps)
    assert sum(row.amount_nano or 0 for row in rows) == summary["totals"]["ledger_nano"]
    assert summary["totals"]["ledger_nano"] == summary["totals"]["trace_nano"] == sum(s["cost_nano"] for s in steps)
    assert summary["totals"]["prompt_tokens"] == sum(s["prompt_tokens"] for s in steps)
    assert summary["totals"]["hit_tokens"] == sum(sum(s["hit_tokens"].values()) for s in steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_demonstration_that_is_ended_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "gateway", "demo", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        until(lambda: bool(_gateways_of(folder)), limit_s=60)
        demo.send_signal(number)
        assert demo.wait(60) == (128 + number if number == signal.SIGTERM else -number)
    until(lambda: not _gateways_of(folder), limit_s=60)


def _gateways_of(folder: Path) -> list[str]:
    """Return the command lines of running gateways with the settings of this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_text().split("\0")
        except OSError:  # it is gone
            continue
        if "serve" in words and str(folder / "keepwarm.toml") in words:
            found.append(" ".join(words))
    return found
