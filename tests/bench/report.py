"""``./bench report [--rows N] [--ledger sqlite|postgresql]``: how long reports take over a large ledger.

A ledger of ``--rows`` requests (default 10,000,000: some 8 GB of disk) over 30 days, 40 teams, 200 keys, 4 models,
8 agents, 6 instances and runs of 20 steps is made by SQL alone, its rollups by the ledger's own ``advance``. Then every
dimension is reported over all of it, and every one that has few values by hour as well; each is timed as the command
runs it: open, read, sum, sort. The yardstick is one pass over the same rows in SQL, which also says whether the report
is right. A dimension that is not there: ``request``, whose groups are the rows themselves.

``--sums`` makes no rows, but directly the sums that ten million such rows come to (864,000 by hour, 37,000 by day,
500,000 runs): what a report over whole hours reads. Seconds are told as they pass and as processor time.
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
from contextlib import ExitStack
from pathlib import Path

from billing.database import LedgerSession, Place, database_at
from billing.database_sqlite import SqliteSession
from billing.ledger_read import LedgerReader, RowFilter
from billing.postgres.database import postgres_database
from billing.price_store import store
from billing.prices import PriceBook
from billing.reports import DIMENSIONS, TIME_HOURS
from billing.rollup import HOUR_NS, KEYS, SUM_COLUMNS, advance
from billing.row import LedgerRow, columns, row_values
from tests.samples.billed import billed
from tests.samples.postgres import running

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
    "labels": """'{"agent":"agent-' || (h % 8) || '","step_name":"s' || (n % 5) || '"}'""",
}
_TYPES = {"int": "BIGINT", "str": "TEXT"}


def fill(session: LedgerSession, rows: int) -> None:
    """Make the ledger."""
    if isinstance(session, SqliteSession):
        session.query("PRAGMA synchronous = OFF")
    book = PriceBook.default()
    store(session, book)
    values = dict(zip(columns(), row_values(billed(1, book)), strict=True))
    parameters = {name: value for name, value in values.items() if name not in _OVERRIDES}
    kinds = {name: _TYPES[str(LedgerRow.__annotations__[name]).partition(" ")[0]] for name in columns()}
    chosen = ", ".join(_OVERRIDES.get(name, f"CAST(:{name} AS {kinds[name]})") for name in columns())
    step = DAYS * 24 * HOUR_NS // rows
    for first in range(0, rows, BATCH_ROWS):
        with session.writing():
            if not isinstance(session, SqliteSession):
                session.execute("SET LOCAL statement_timeout = 0")
                for at in (first, first + BATCH_ROWS):
                    session.query(f"SELECT make_ledger_month({START_NS + at * step})")
            session.execute(
                f"""
                INSERT INTO requests ({", ".join(columns())})
                WITH RECURSIVE numbers(n) AS (
                    SELECT CAST(:first AS BIGINT) UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :last
                  ),
                  drawn AS (SELECT n, {START_NS} + n * {step} AS t, (n / 20 * 2654435761 + 7919) % 1000000007 AS h
                  FROM numbers)
                SELECT {chosen} FROM drawn
                """,
                {**parameters, "first": first, "last": min(first + BATCH_ROWS, rows)},
            )
    while advance(session, BATCH_ROWS // 5):
        pass
    if isinstance(session, SqliteSession):
        session.query("PRAGMA wal_checkpoint(TRUNCATE)")


def fill_sums(session: LedgerSession) -> None:
    """Make the sums of 30 days: 1,200 combinations in every hour, 500,000 runs."""
    session.query("PRAGMA synchronous = OFF")
    keys = dict.fromkeys(KEYS, "'same'")
    keys |= {"team": "'team-' || (n % 40)", "key": "'key-' || (n % 200)", "instance": "'engine-' || (n / 200)"}
    keys |= {"model": "'model-' || (n % 4)", "served_model": "'model-' || (n % 4)", "agent": "'agent-' || (n % 8)"}
    keys |= {"outcome": "CASE WHEN n % 50 = 0 THEN 'aborted' ELSE 'ok' END", "currency": "'USD'"}
    first, names = START_NS // HOUR_NS, ", ".join(SUM_COLUMNS)
    count = "WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c WHERE n + 1 < :last)"
    drawn = ", ".join(f"(hour * 7919 + k * {place + 3}) % 100003" for place in range(len(SUM_COLUMNS)))
    with session.writing():
        columns_ = ", ".join(f"k_{name}" for name in KEYS)
        session.execute(
            f"INSERT INTO rollup_keys (id, {columns_}) {count} SELECT n, {', '.join(keys.values())} FROM c",
            {"last": 1200},
        )
        session.execute(
            f"INSERT INTO rollups {count}, hours AS (SELECT n + {first} AS hour FROM c WHERE n < {DAYS * 24}),"
            f" ids AS (SELECT n AS k FROM c) SELECT hour, k, {drawn} FROM hours CROSS JOIN ids",
            {"last": 1200},
        )
        added = ", ".join(f"sum({name})" for name in SUM_COLUMNS)
        session.execute(f"INSERT INTO day_rollups SELECT hour / 24, key_id, {added} FROM rollups GROUP BY 1, 2")
        for dimension, value, last in (
            ("run", "'run-' || n", 500_000),
            ("step", "'' || (n % 20)", 20 * DAYS),
            ("label:step_name", "'s' || (n % 5)", 5 * DAYS),
            ("label:agent", "'agent-' || (n % 8)", 8 * DAYS),
        ):
            sums = ", ".join(f"n % {1000 + place}" for place in range(len(SUM_COLUMNS)))
            session.execute(
                f"INSERT INTO value_rollups (day, dimension, value, currency, {names}) {count}"
                f" SELECT {first // 24} + n / {last // DAYS + 1}, '{dimension}', {value}, 'USD', {sums} FROM c"
                " WHERE true ON CONFLICT DO NOTHING",
                {"last": last},
            )


def run_sums(place: Path) -> dict[str, object]:
    """Time the reports over sums alone."""
    session = database_at(place).open()
    fill_sums(session)
    session.close()
    reports: dict[str, dict[str, object]] = {}
    for by in asked():
        processor = time.process_time()
        seconds, groups, _ = timed(place, by, RowFilter())
        used = round(time.process_time() - processor, 3)
        reports[",".join(by) or "totals"] = {"seconds": round(seconds, 3), "processor_s": used, "groups": groups}
    return {"benchmark": "report over sums", "reports": reports}


def timed(place: Place, by: Sequence[str], where: RowFilter) -> tuple[float, int, int]:
    """Return the seconds of a report, its groups, its amount."""
    gc.disable()  # as the command does
    started = time.perf_counter()
    with LedgerReader(place) as reader:
        report = reader.report(by, where)
    seconds = time.perf_counter() - started
    gc.enable()
    return seconds, len(report.groups), sum(total.sums.amount_nano for total in report.totals)


def scan(place: Place, where: RowFilter) -> tuple[float, int]:
    """Return the seconds and the amount of one pass over the rows."""
    session = database_at(place).open_readonly()
    clause, values = where.sql()
    started = time.perf_counter()
    amount = session.query(f"SELECT sum(amount_nano) FROM requests{clause}", values)[0][0]
    seconds = time.perf_counter() - started
    session.close()
    return seconds, int(amount)


def asked() -> list[tuple[str, ...]]:
    """Return what is reported over all 30 days."""
    few = [name for name in DIMENSIONS if name not in ("run", "step", "request", *TIME_HOURS)]
    several = [("team", "model", "agent"), ("day", "team"), ("hour", "team", "model"), ("key", "outcome", "month")]
    many = [("run",), ("step",), ("label:step_name",), ("day", "step"), ("day", "label:step_name")]
    return [(), *((name,) for name in (*few, *TIME_HOURS)), *(("hour", name) for name in few), *several, *many]


def run(rows: int, place: Place) -> dict[str, object]:
    """Make the ledger and time the reports."""
    started = time.perf_counter()
    session = database_at(place).open()
    if not session.query("SELECT 1 FROM requests LIMIT 1"):
        fill(session, rows)
    session.close()
    made_s = time.perf_counter() - started
    odd = RowFilter(since_ns=START_NS + HOUR_NS // 3, until_ns=START_NS + 20 * 24 * HOUR_NS + 777)
    day = RowFilter(since_ns=START_NS, until_ns=START_NS + 24 * HOUR_NS)
    scan_s, whole = scan(place, RowFilter())
    _, part = scan(place, odd)
    questions = [(by, RowFilter(), whole, "") for by in asked()]
    questions += [(("team",), odd, part, " of 20 days"), (("run", "team"), day, None, " of one day")]
    questions += [(("step",), RowFilter(run_id="run-77"), None, " of one run")]
    reports: dict[str, dict[str, object]] = {}
    for by, where, right, words in questions:
        seconds, groups, amount = timed(place, by, where)
        assert right is None or amount == right, (by, amount, right)
        reports[(",".join(by) or "totals") + words] = {"seconds": round(seconds, 3), "groups": groups}
    with LedgerReader(place) as reader:
        rollups = reader.count("rollups")
    slowest = max(reports, key=lambda name: float(str(reports[name]["seconds"])))
    return {
        "benchmark": "report",
        "ledger": "sqlite" if isinstance(place, Path) else "postgresql",
        "rows": rows,
        "rollups": rollups,
        "made_s": round(made_s, 1),
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version},
        "one_pass_over_rows_s": round(scan_s, 3),
        "slowest": {slowest: reports[slowest]},
        "reports": reports,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark and print what it measured."""
    parser = argparse.ArgumentParser(prog="./bench report", description="The time of reports over a large ledger.")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--ledger", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--sums", action="store_true", help="no rows, only the sums of ten million")
    parser.add_argument("--folder", type=Path, help="make the file here and leave it, or use the one that is there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepwarm-report-")))
        place: Place = folder / "ledger.sqlite3"
        if args.ledger == "postgresql":
            place = postgres_database(stack.enter_context(running()).database(), folder / "journal")
        result = run_sums(folder / "sums.sqlite3") if args.sums else run(args.rows, place)
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
