"""``./bench accounts [--requests N]``: do rows, counters, report, CSV, FOCUS and trace agree whatever went wrong?

``--requests`` (default 1,000,000) simulated requests come from four processes that write to one ledger and one trace
store each: answers, aborts, refusals, failures, failovers of two attempts, retries of the same request id, unknown
prices. Workers are killed with SIGKILL at random moments, again and again, and started anew where they stopped; what
was in flight then has a row that says so. At the end every sum is computed in every way there is and compared exactly;
one request in ten has a trace, whose amount is compared with its row's. What a request costs is a function of its
number, so what the ledger must hold is computed apart from it as well.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random

from billing.counters import LedgerCounters
from billing.focus import export
from billing.focus_check import focus_faults
from billing.ledger import Ledger, LedgerOptions
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from billing.reports import render_csv, render_json
from billing.verify import verify_ledger
from tests.samples.billed import altered, billed, died_in_flight, unpriced
from tracing.record import Attempt, Outcome, RequestRecord, Usage
from tracing.store import TraceStore

PROCESSES, KILLS, IN_FLIGHT = 4, 12, 8
ROOT = Path(__file__).parents[2]
_OUTCOMES = (Outcome.ABORTED, Outcome.REJECTED, Outcome.UPSTREAM_FAILED, Outcome.TRUNCATED)


def simulated(number: int, book: PriceBook) -> RequestRecord:
    """Return request ``number``: the same number gives the same record, always."""
    if number % 97 == 0:
        return unpriced(number, book)
    record = billed(number, book)
    if number % 11 == 0:
        outcome = _OUTCOMES[number // 11 % len(_OUTCOMES)]
        record = altered(record, outcome=outcome, status=499)
        if outcome is Outcome.REJECTED:
            free = billed(number, book, usage=Usage())
            record = altered(record, usage=free.usage, charge=free.charge, attempts=())
    if number % 13 == 0:
        first = record.stamps.arrived_ns
        record = altered(record, attempts=(Attempt("engine-9", first, first + 1, 503), *record.attempts))
    return record


def worker(folder: Path, first: int, last: int, step: int) -> None:
    """Write the requests of one process; tell the numbers that are done."""
    book = PriceBook.default()
    with Ledger(folder / "ledger.sqlite3", LedgerOptions(adopt_interval_s=0.5)) as ledger:
        traces = TraceStore(folder / f"traces-{first % step}.sqlite3")
        flying: deque[RequestRecord] = deque()
        for number in range(first, last + IN_FLIGHT * step, step):
            if number < last:
                flying.append(simulated(number, book))
                ledger.admit(died_in_flight(number, book))
            if number < first + IN_FLIGHT * step or not flying:
                continue
            record = flying.popleft()
            ledger.append(record)
            if number % 101 == 0:
                ledger.append(record)  # a retry that came through twice
            if number % 10 < step:
                traces.append(record)
            if number % 4096 < step:  # no faster than the disk takes it
                traces.flush(60)
                assert ledger.flush(300)
            if number % 256 < step:
                os.write(1, b"%d\n" % (number - IN_FLIGHT * step))
        while flying:
            ledger.append(flying.popleft())
        os.write(1, b"%d\n" % last)
        traces.close()


def drive(folder: Path, requests: int) -> int:
    """Run the workers, kill them at random, start them again after what they told; return how many were killed."""
    random, kills = Random(requests), 0
    places = {number: number for number in range(PROCESSES)}  # worker -> next number
    running: dict[int, subprocess.Popen[bytes]] = {}
    due = sorted(random.randrange(requests) for _ in range(KILLS))
    while places:
        for name, place in places.items():
            if name not in running:
                words = [sys.executable, "-m", "tests.bench.accounts", "--worker", str(folder)]
                running[name] = subprocess.Popen([*words, str(place), str(requests)], cwd=ROOT, stdout=subprocess.PIPE)
        for name in list(running):
            process = running[name]
            assert process.stdout is not None
            line = process.stdout.readline()
            if line:
                told = int(line)
                places[name] = told + PROCESSES if told < requests else requests
                if due and sum(places.values()) / PROCESSES >= due[0]:
                    due.pop(0)
                    kills += 1
                    process.send_signal(signal.SIGKILL)
                    for rest in process.stdout:
                        if rest.endswith(b"\n") and int(rest) < requests:
                            places[name] = int(rest) + PROCESSES
                    process.wait()
                    del running[name]
            else:
                if process.wait() != 0:
                    raise RuntimeError(f"worker {name} ended with {process.returncode}")
                del running[name], places[name]
    return kills


def compare(folder: Path, numbers: Sequence[int]) -> dict[str, object]:
    """Compute every sum over these requests in every way; raise ``AssertionError`` where two differ."""
    path, book = folder / "ledger.sqlite3", PriceBook.default()
    with Ledger(path) as ledger:  # imports what the last killed process left
        ledger.register(book)
    expected: dict[str, int] = {}
    died = 0
    with LedgerReader(path) as reader:
        seen: set[str] = set()
        rows = {"requests": 0, "amount_nano": 0, "saved_nano": 0, "unpriced": 0, "tokens": 0}
        for row in reader.rows():
            assert row.request_id not in seen, f"{row.request_id} is there twice"
            seen.add(row.request_id)
            died += row.outcome == "died"
            rows["requests"] += 1
            rows["amount_nano"] += row.amount_nano or 0
            rows["saved_nano"] += row.saved_nano or 0
            rows["unpriced"] += row.amount_nano is None
            rows["tokens"] += row.prompt_tokens + row.output_tokens
            expected[row.request_id] = -1 if row.outcome == "died" else row.amount_nano or 0
        report = reader.report(("team", "outcome"))
        (total,) = reader.report().totals
        focus = export(reader.rows(), reader.price_books(), "USD")
    assert seen == {f"req-{number}" for number in numbers}, "a row is lost"
    right = {f"req-{n}": simulated(n, book).charge.amount_nano or 0 for n in numbers}
    assert all(amount in (-1, right[name]) for name, amount in expected.items()), "a row has another amount"
    ways = {"rows": rows}
    ways["report"] = {name: getattr(total.sums, name) for name in rows if name != "tokens"}
    ways["report"]["tokens"] = total.sums.prompt_tokens + total.sums.output_tokens
    lines = list(csv.DictReader(io.StringIO(render_csv(report))))
    ways["csv"] = {name: sum(int(line[name]) for line in lines) for name in rows if name != "tokens"}
    ways["csv"]["tokens"] = sum(int(line["prompt_tokens"]) + int(line["output_tokens"]) for line in lines)
    (told,) = json.loads(render_json(report))["totals"]
    ways["json"] = {name: told[name] for name in rows if name != "tokens"}
    ways["json"]["tokens"] = told["prompt_tokens"] + told["output_tokens"]
    counters = LedgerCounters(path)
    sums = counters.refresh().values()
    counters.close()
    ways["counters"] = {name: sum(getattr(s, name) for s in sums) for name in rows if name != "tokens"}
    ways["counters"]["tokens"] = sum(s.prompt_tokens + s.output_tokens for s in sums)
    for name, way in ways.items():
        assert way == rows, f"{name}: {way}, rows: {rows}"
    assert focus_faults(focus.lines(), rows["amount_nano"], "USD") == []
    assert (focus.billed_nano, focus.requests, focus.unpriced) == (
        rows["amount_nano"],
        rows["requests"],
        rows["unpriced"],
    )
    traced = _traced(folder, expected)
    return {"ways": rows, "died_in_flight": died, "focus_lines": len(focus.sums), **traced}


def _traced(folder: Path, amounts: dict[str, int]) -> dict[str, object]:
    """Compare the amount of every trace with its row's. A trace of a killed process may be missing, or its row died."""
    traced = agree = 0
    for path in sorted(folder.glob("traces-*.sqlite3")):
        store = TraceStore(path)
        for record in store.recent(10**9):
            traced += 1
            stands = amounts[record.request_id]
            assert stands in (-1, record.charge.amount_nano or 0), f"{record.request_id}: trace and bill disagree"
            agree += stands != -1
        store.close()
    return {"traced": traced, "traced_and_billed_alike": agree}


def main(argv: list[str]) -> int:
    """Run the simulation and print what was compared."""
    parser = argparse.ArgumentParser(prog="./bench accounts", description="Do all accounts agree?")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "FIRST", "LAST"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        folder, first, last = args.worker
        worker(Path(folder), int(first), int(last), PROCESSES)
        return 0
    with tempfile.TemporaryDirectory(prefix="keepwarm-accounts-") as name:
        folder = Path(name)
        with Ledger(folder / "ledger.sqlite3") as ledger:
            ledger.register(PriceBook.default())
        started = time.perf_counter()
        kills = drive(folder, args.requests)
        written_s = time.perf_counter() - started
        result = {"benchmark": "accounts", "requests": args.requests, "processes": PROCESSES, "killed": kills}
        result |= {"written_s": round(written_s, 1), **compare(folder, range(args.requests))}
        started = time.perf_counter()
        verification = verify_ledger(folder / "ledger.sqlite3")
        assert verification.passed, verification.faults
        result["verified_rows"] = verification.rows
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
