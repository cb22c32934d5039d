"""``./bench ledger [--ledger sqlite|postgresql]``: what the ledger sustains, and what it adds to a request.

In one run, on one disk, with the same rows:

* ``floor``: plain ``executemany`` into the same table in groups of 5,000, synced per group, on one thread and with the
  rows flattened before the clock starts: what a program would do that has only the rows to store.
* ``naive``: one synced commit for each row, as a ledger without groups and journal would have to.
* ``flood``: records through ``Ledger.admit`` and ``append``, as the gateway does, as fast as one thread can, until all
  are committed; rollups are brought up on the way.
* ``paced``: records at 5,000 a second on a fixed timetable; the time of ``admit`` and ``append`` is a request's.

``ratios``: ``flood`` to floor (flattening and the journal are in it), ``naive`` (flood to naive), ``paced`` (rows/s
committed to rows/s offered).

In PostgreSQL (a real server on this machine, syncing) there are ``flood`` and ``paced`` alone.
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
from billing.database import Place
from billing.ledger import Ledger, LedgerOptions
from billing.postgres.database import postgres_database
from billing.prices import PriceBook
from billing.row import row_values
from billing.verify import verify_ledger
from tests.samples.billed import billed
from tests.samples.postgres import running
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


def flood(place: Place, records: Sequence[RequestRecord]) -> float:
    """Rows/s through the ledger, from the first admission to the last commit."""
    with Ledger(place) as ledger:
        ledger.register(PriceBook.default())
        started = time.perf_counter()
        for record in records:
            ledger.admit(record)
            ledger.append(record)
        assert ledger.flush(600)
        return len(records) / (time.perf_counter() - started)


def paced(place: Place, records: Sequence[RequestRecord]) -> dict[str, float]:
    """Admit and append on a fixed timetable; return what both take together in µs and the committed rate."""
    latencies: list[int] = []
    with Ledger(place) as ledger:
        ledger.register(PriceBook.default())
        started = time.perf_counter_ns()
        for number, record in enumerate(records):
            ahead = started + number * 10**9 // OFFERED_ROWS_PER_S - time.perf_counter_ns()
            if ahead > 0:
                time.sleep(ahead / 1e9)
            before = time.perf_counter_ns()
            ledger.admit(record)
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
        "request_p50_us": at(0.5),
        "request_p90_us": at(0.9),
        "request_p99_us": at(0.99),
        "request_p999_us": at(0.999),
        "request_max_us": latencies[-1] / 1000,
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


def run_postgres(rows: int, folder: Path) -> dict[str, object]:
    """Measure the ledger in a server."""
    records = [billed(number, PriceBook.default()) for number in range(rows)]
    gc.collect()
    gc.freeze()
    with running(syncs=True) as server:
        places = [postgres_database(server.database(), folder / f"journal-{number}") for number in range(2)]
        flood_rate, steady = flood(places[0], records), paced(places[1], records)
        for place in places:
            verification = verify_ledger(place)
            assert verification.passed, verification.faults
            assert verification.rows == rows, f"{verification.rows} of {rows} rows"
    return {
        "benchmark": "ledger in postgresql",
        "rows": rows,
        "versions": {"python": platform.python_version(), "postgresql": server.version},
        "flood_rows_per_s": flood_rate,
        "paced": steady,
        "ratios": {"paced": steady["committed_rows_per_s"] / steady["offered_rows_per_s"]},
    }


def main(argv: list[str]) -> int:
    """Run the benchmark and print what it measured."""
    parser = argparse.ArgumentParser(prog="./bench ledger", description="The ledger's throughput and latency.")
    parser.add_argument("--rows", type=int, default=50_000, help="rows in each part (default 50,000)")
    parser.add_argument("--ledger", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="keepwarm-ledger-") as folder:
        result = (run if args.ledger == "sqlite" else run_postgres)(args.rows, Path(folder))
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
