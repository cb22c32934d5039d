"""``./bench report [--rows N] [--json FILE]``: how long reports take over a large ledger, and that they are right.

A ledger of ``--rows`` requests (default 10,000,000: some 6 GB of disk) over 30 days, 40 teams, 200 keys, 4 models,
8 agents, 6 instances and runs of 20 steps is made by SQL alone, its rollups by the ledger's own ``advance``. Each
report is timed as the command runs it: open, read, sum, sort. The yardstick is one pass over the same rows in SQL,
which also says whether the report is right.
"""

from __future__ import annotations

import argparse
import json
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from billing import schema
from billing.ledger_read import LedgerReader, RowFilter
from billing.prices import PriceBook
from billing.rollup import HOUR_NS, advance
from billing.row import columns, row_values
from tests.samples.billed import billed

START_NS = 1_790_000_000 * 10**9 // HOUR_NS * HOUR_NS
DAYS = 30
BATCH_ROWS = 250_000

_OVERRIDES = {
    "request_id": "'req-' || n",
    "arrived_ns": "t",
    "posted_ns": "t",
    "first_token_ns": "t + 200000000",
    "closed_ns": "t + 2000000000",
    "team": "'team-' || (h % 40)",
    "key_id": "'key-' || (h % 200)",
    "model": "'model-' || (h % 4)",
    "served_model": "'model-' || (h % 4)",
    "agent": "'agent-' || (h % 8)",
    "instance": "'engine-' || (n % 6)",
    "run_id": "'run-' || (n / 20)",
    "step": "n % 20 + 1",
    "fresh_tokens": "h % 4000",
    "hit_device_tokens": "h % 60000",
    "output_tokens": "h % 900",
    "amount_nano": "h % 1000003",
    "saved_nano": "h % 999983",
    "outcome": "CASE WHEN h % 50 = 0 THEN 'aborted' ELSE 'ok' END",
}


def fill(path: Path, rows: int) -> None:
    """Make the ledger."""
    connection = schema.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    book = PriceBook.default()
    connection.execute(
        "INSERT INTO prices (version, name, currency, body) VALUES (?, ?, ?, ?)",
        (book.version, book.name, book.currency, book.body),
    )
    values = dict(zip(columns(), row_values(billed(1, book)), strict=True))
    parameters = {name: value for name, value in values.items() if name not in _OVERRIDES}
    chosen = ", ".join(_OVERRIDES.get(name, f":{name}") for name in columns())
    step = DAYS * 24 * HOUR_NS // rows
    for first in range(0, rows, BATCH_ROWS):
        connection.execute(
            f"""
            INSERT INTO requests ({", ".join(columns())})
            WITH RECURSIVE numbers(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :last),
              drawn AS (SELECT n, {START_NS} + n * {step} AS t, (n / 20 * 2654435761 + 7919) % 1000000007 AS h
              FROM numbers)
            SELECT {chosen} FROM drawn
            """,
            {**parameters, "first": first, "last": min(first + BATCH_ROWS, rows)},
        )
    while advance(connection, BATCH_ROWS):
        pass
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def timed(path: Path, by: Sequence[str], where: RowFilter) -> tuple[float, int, int]:
    """Return the seconds of a report, its groups, its amount."""
    started = time.perf_counter()
    with LedgerReader(path) as reader:
        report = reader.report(by, where)
    seconds = time.perf_counter() - started
    return seconds, len(report.groups), sum(total.sums.amount_nano for total in report.totals)


def scan(path: Path, where: RowFilter) -> tuple[float, int]:
    """Return the seconds and the amount of one pass over the rows."""
    connection = sqlite3.connect(path)
    clause, values = where.sql()
    started = time.perf_counter()
    amount = connection.execute(f"SELECT sum(amount_nano) FROM requests{clause}", values).fetchone()[0]
    seconds = time.perf_counter() - started
    connection.close()
    return seconds, int(amount)


def run(rows: int, folder: Path) -> dict[str, object]:
    """Make the ledger and time the reports."""
    path = folder / "ledger.sqlite3"
    started = time.perf_counter()
    if not path.exists():
        fill(path, rows)
    made_s = time.perf_counter() - started
    odd = RowFilter(since_ns=START_NS + HOUR_NS // 3, until_ns=START_NS + 20 * 24 * HOUR_NS + 777)
    scan_s, whole = scan(path, RowFilter())
    _, part = scan(path, odd)
    reports: dict[str, dict[str, object]] = {}
    for words, where, right in (
        ("", RowFilter(), whole),
        ("team", RowFilter(), whole),
        ("team,model,agent", RowFilter(), whole),
        ("day,team", RowFilter(), whole),
        ("hour,model", RowFilter(), whole),
        ("key,outcome,month", RowFilter(), whole),
        ("team", odd, part),
        ("run", RowFilter(since_ns=START_NS, until_ns=START_NS + 24 * HOUR_NS), None),
        ("step", RowFilter(run_id="run-77"), None),
    ):
        seconds, groups, amount = timed(path, [word for word in words.split(",") if word], where)
        assert right is None or amount == right, (words, amount, right)
        name = (words or "totals") + (" of 20 days" if where is odd else " of one day" if words == "run" else "")
        reports[name] = {"seconds": round(seconds, 3), "groups": groups}
    with LedgerReader(path) as reader:
        rollups = reader.count("rollups")
    return {
        "benchmark": "report",
        "rows": rows,
        "ledger_bytes": path.stat().st_size,
        "rollups": rollups,
        "made_s": round(made_s, 1),
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version},
        "one_pass_over_rows_s": round(scan_s, 3),
        "reports": reports,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark and print what it measured."""
    parser = argparse.ArgumentParser(prog="./bench report", description="The time of reports over a large ledger.")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="make the ledger here and leave it, or use the one that is there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="keepwarm-report-") as folder:
        result = run(args.rows, args.folder or Path(folder))
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
