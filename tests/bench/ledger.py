"""``./bench ledger [--json FILE]``: what the ledger sustains, and what it adds to a request.

In one run, on one disk, with the same rows:

* ``floor``: plain ``executemany`` into the same table in groups of 5,000, synced per group, on one thread and with the
  rows flattened before the clock starts: what a program would do that has only the rows to store.
* ``naive``: one synced commit for each row, as a ledger without groups and journal would have to.
* ``flood``: records through ``Ledger.append`` as fast as one thread can, until all are committed.
* ``paced``: records at 5,000 a second on a fixed timetable; the time of each ``append`` is what a request pays.

``ratios``: ``flood`` to floor (flattening and the journal are in it), ``naive`` (flood to naive), ``paced`` (rows/s
committed to rows/s offered).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from billing import schema
from billing.ledger import Ledger, LedgerOptions
from billing.prices import PriceBook
from billing.row import row_values
from billing.verify import verify_ledger
from tests.samples.billed import billed
from tracing.record import RequestRecord

OFFERED_ROWS_PER_S = 5000


def floor(path: Path, records: Sequence[RequestRecord], group_rows: int) -> float:
    """Rows/s of plain ``executemany``."""
    rows = [row_values(record) for record in records]
    connection = schema.connect(path)
    started = time.perf_counter()
    for first in range(0, len(rows), group_rows):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(schema.insert_sql(1), rows[first : first + group_rows])
        connection.execute("COMMIT")
    rate = len(rows) / (time.perf_counter() - started)
    connection.close()
    return rate


def flood(path: Path, records: Sequence[RequestRecord]) -> float:
    """Rows/s through the ledger, from the first append to the last commit."""
    with Ledger(path) as ledger:
        ledger.register(PriceBook.default())
        started = time.perf_counter()
        for record in records:
            ledger.append(record)
        assert ledger.flush(600)
        return len(records) / (time.perf_counter() - started)


def paced(path: Path, records: Sequence[RequestRecord]) -> dict[str, float]:
    """Append on a fixed timetable; return the latency of ``append`` in µs and the committed rate."""
    latencies: list[int] = []
    with Ledger(path) as ledger:
        ledger.register(PriceBook.default())
        started = time.perf_counter_ns()
        for number, record in enumerate(records):
            ahead = started + number * 10**9 // OFFERED_ROWS_PER_S - time.perf_counter_ns()
            if ahead > 0:
                time.sleep(ahead / 1e9)
            before = time.perf_counter_ns()
            ledger.append(record)
            latencies.append(time.perf_counter_ns() - before)
        offered = len(records) / ((time.perf_counter_ns() - started) / 1e9)
        before = time.perf_counter_ns()
        assert ledger.flush(600)
        lag_ms = (time.perf_counter_ns() - before) / 1e6
        committed = len(records) / ((time.perf_counter_ns() - started) / 1e9)
    latencies.sort()

    def at(quantile: float) -> float:
        return latencies[min(int(len(latencies) * quantile), len(latencies) - 1)] / 1000

    return {
        "offered_rows_per_s": offered,
        "committed_rows_per_s": committed,
        "append_p50_us": at(0.5),
        "append_p90_us": at(0.9),
        "append_p99_us": at(0.99),
        "append_p999_us": at(0.999),
        "append_max_us": latencies[-1] / 1000,
        "lag_at_end_ms": lag_ms,
    }


def run(rows: int, folder: Path) -> dict[str, object]:
    """Measure everything once; every ledger is verified afterwards."""
    book = PriceBook.default()
    records = [billed(number, book) for number in range(rows)]
    gc.collect()
    gc.freeze()  # the records are the benchmark's, not the ledger's: keep the collector from walking them
    options = LedgerOptions()
    floor_rate = floor(folder / "floor.db", records, options.max_group_rows)
    few = records[: max(rows // 50, 100)]
    naive_rate = floor(folder / "naive.db", few, 1)
    flood_rate = flood(folder / "flood.db", records)
    steady = paced(folder / "paced.db", records)
    started = time.perf_counter()
    for name in ("flood.db", "paced.db"):
        verification = verify_ledger(folder / name)
        assert verification.passed, verification.faults
        assert verification.rows == rows, f"{verification.rows} of {rows} rows"
    verify_rate = 2 * rows / (time.perf_counter() - started)
    return {
        "benchmark": "ledger",
        "rows": rows,
        "row_bytes": (folder / "flood.db").stat().st_size / rows,
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version},
        "floor_rows_per_s": floor_rate,
        "naive_rows_per_s": naive_rate,
        "flood_rows_per_s": flood_rate,
        "paced": steady,
        "verify_rows_per_s": verify_rate,
        "ratios": {
            "flood": flood_rate / floor_rate,
            "naive": flood_rate / naive_rate,
            "paced": steady["committed_rows_per_s"] / steady["offered_rows_per_s"],
        },
    }


def main(argv: list[str]) -> int:
    """Run the benchmark and print what it measured."""
    parser = argparse.ArgumentParser(prog="./bench ledger", description="The ledger's throughput and latency.")
    parser.add_argument("--rows", type=int, default=50_000, help="rows in each part (default 50,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="keepwarm-ledger-") as folder:
        result = run(args.rows, Path(folder))
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
