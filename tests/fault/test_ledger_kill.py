"""``kill -9`` of a process that writes to the ledger: whatever it acknowledged is there, once, and verifies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from billing.row import row_of
from billing.verify import verify_ledger
from tests.samples.billed import billed, died_in_flight
from tests.samples.ledger_writer import OPTIONS

ROOT = Path(__file__).parents[2]


def start(path: Path, first: int, count: int, *step: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.samples.ledger_writer", str(path), str(first), str(count), *step]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def acknowledged(output: bytes) -> list[int]:
    """The rows that the process told: whole lines only, its last may be cut."""
    return [int(line) for line in output.split(b"\n")[:-1] if line.isdigit()]


def recovered(path: Path) -> list[str]:
    """Open the ledger as the next process would; return the ids it holds then."""
    with Ledger(path, OPTIONS) as ledger:
        ledger.register(PriceBook.default())
    left = list(path.with_name(path.name + ".journal").glob("*.journal"))
    assert left == []
    with LedgerReader(path) as reader:
        rows = list(reader.rows())
    book = PriceBook.default()
    for row in rows:
        assert row == row_of(billed(int(row.request_id.removeprefix("req-")), book))
    assert verify_ledger(path).faults == []
    return [row.request_id for row in rows]


def check(path: Path, acked: list[int], *, unacknowledged: int) -> None:
    ids = recovered(path)
    assert max(Counter(ids).values(), default=1) == 1
    missing = {f"req-{number}" for number in acked} - set(ids)
    assert missing == set()
    assert len(ids) - len(acked) <= unacknowledged


@pytest.mark.parametrize("step", ["torn", "journaled", "begin", "insert", "commit", "committed", "sealed"])
def test_killed_at_each_step_of_the_write_path(tmp_path: Path, step: str) -> None:
    path = tmp_path / "ledger.sqlite3"
    Ledger(path, OPTIONS).start().close()
    process = start(path, 0, 3000, step)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    acked = acknowledged(output)
    if step in ("torn", "journaled"):
        assert len(acked) == 5
    check(path, acked, unacknowledged=1)


@pytest.mark.parametrize("step", ["commit", "adopted"])
def test_killed_while_it_imports_what_another_left(tmp_path: Path, step: str) -> None:
    path = tmp_path / "ledger.sqlite3"
    Ledger(path, OPTIONS).start().close()
    output, _ = start(path, 0, 100, "journaled").communicate(timeout=60)
    acked = acknowledged(output)
    process = start(path, 200, 10, step)
    second, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert b"ready" not in second
    check(path, acked, unacknowledged=1)


def test_killed_at_random_points_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    random = Random(20_261_129)
    acked: list[int] = []
    rounds = 4
    for number in range(rounds):
        process = start(path, number * 100_000, 100_000)
        assert process.stdout is not None
        wanted, output = random.randrange(1, 1500), b""
        while output.count(b"\n") <= wanted:
            output += os.read(process.stdout.fileno(), 65536)
        process.kill()
        rest, _ = process.communicate(timeout=60)
        acked += acknowledged(output + rest)
    check(path, acked, unacknowledged=rounds)


def test_a_request_that_was_in_flight_when_its_process_died_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    Ledger(path, OPTIONS).start().close()
    process = start(path, 0, 100_000, "admitting")
    assert process.stdout is not None
    output = b""
    while output.count(b"\n") < 300:  # beyond several changes of the journal file
        output += os.read(process.stdout.fileno(), 65536)
    process.kill()
    rest, _ = process.communicate(timeout=60)
    acked = acknowledged(output + rest)
    with Ledger(path, OPTIONS) as ledger:
        ledger.register(PriceBook.default())
        status = ledger.status()
        assert (status.conflicts, status.damaged_bytes) == (0, 0)
    with LedgerReader(path) as reader:
        rows = {row.request_id: row for row in reader.rows()}
    assert set(acked) <= {int(request_id.removeprefix("req-")) for request_id in rows} <= {*acked, len(acked)}
    book = PriceBook.default()
    for number in acked:
        assert rows[f"req-{number}"] == row_of((billed if number % 2 else died_in_flight)(number, book))
    assert sum(row.outcome == "died" for row in rows.values()) == status.died_in_flight >= 150
    assert verify_ledger(path).faults == []


def test_several_processes_write_at_once_and_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    processes = [start(path, first, 400) for first in (0, 200, 1000)]  # two of them write the same 200 rows
    victim = start(path, 5000, 100_000)
    assert victim.stdout is not None
    output = b""
    while output.count(b"\n") < 300:
        output += os.read(victim.stdout.fileno(), 65536)
    victim.kill()
    rest, _ = victim.communicate(timeout=60)
    acked = set(acknowledged(output + rest))
    for process in processes:
        told, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert told.endswith(b"closed\n")
        acked |= set(acknowledged(told))
    assert len(acked) >= 1000 + 299
    check(path, sorted(acked), unacknowledged=1)
