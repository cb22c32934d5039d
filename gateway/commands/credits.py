"""``keepwarm credits``: post what is free by allowances, and what the platform gives back for hits that it lost."""

from __future__ import annotations

import argparse
import sys
import time

from billing.attribution import attribute
from billing.attribution_lost import lost_hit_grants
from billing.credits import LOST_HITS, key_of
from billing.errors import BillingError, ReportError
from billing.ledger_read import LedgerReader
from billing.periods import post
from billing.reports import format_money
from billing.row import LedgerRow
from billing.settlement import allowance_rows, missing_credits, month_filter
from billing.tables import counted
from gateway.commands.attribution import load_asked
from gateway.commands.report import add_ledger_arguments, ledger_place, utc_text
from gateway.commands.traces import add_traces_argument
from gateway.errors import SettingsError
from tracing.errors import TracingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    settle = actions.add_parser("settle", help="post what a month's free allowances come to and is not posted yet")
    lost = actions.add_parser("lost-hits", help="post what the price book gives back for a month's lost hits")
    add_traces_argument(lost)
    lost.add_argument(
        "--partial", action="store_true", help="some of its traces are gone: post what is found and take nothing back"
    )
    listed = actions.add_parser("list", help="list the credits that are posted")
    for action in (settle, lost):
        action.add_argument("month", metavar="MONTH", help="2026-11, of the UTC calendar")
        action.add_argument("--dry-run", action="store_true", help="say what it comes to and post nothing")
    add_ledger_arguments(parser, settle, lost, listed)


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status."""
    try:
        if args.action == "list":
            return _list(args)
        try:
            month = month_filter(args.month)
            if not 0 <= (month.since_ns or 0) < (month.until_ns or 0) < 2**63:  # no row is of another time
                raise ValueError
        except (ValueError, OverflowError):
            raise ReportError(f"{args.month!r} is no month: write 2026-11") from None
        rows = _allowances(args) if args.action == "settle" else _lost_hits(args)
        for currency in sorted({row.currency for row in rows}):
            amounts = [row.amount_nano or 0 for row in rows if row.currency == currency]
            print(f"{counted(len(amounts), 'credit')}, together {format_money(-sum(amounts))} {currency}")
        if not rows:
            print("nothing to post")
        elif not args.dry_run:
            post(ledger_place(args), rows)
    except (BillingError, SettingsError, TracingError) as error:
        print(f"keepwarm credits: {error}", file=sys.stderr)
        return 1
    return 0


def _allowances(args: argparse.Namespace) -> list[LedgerRow]:
    with LedgerReader(ledger_place(args)) as reader:
        return allowance_rows(reader, args.month, time.time_ns())


def _lost_hits(args: argparse.Namespace) -> list[LedgerRow]:
    """The month's requests are attributed with everything before them that is kept, so that its first hits count."""
    where = month_filter(args.month)
    assert where.since_ns is not None
    assert where.until_ns is not None
    args.since, args.until = None, utc_text(where.until_ns)
    records, books, lives = load_asked(args)
    arrived = sum(record.stamps.arrived_ns >= where.since_ns for record in records)
    losses = attribute(records, books, restarts=lives).lost
    granted = lost_hit_grants(each for each in losses if each.record.stamps.arrived_ns >= where.since_ns)
    with LedgerReader(ledger_place(args)) as reader:
        reader.check_kept(where)
        billed = sum(not row.revision and row.arrived_ns >= where.since_ns for row in reader.rows(where))
        rows = missing_credits(granted, reader.credits(), LOST_HITS, args.month, time.time_ns())
    if arrived < billed and not args.partial:
        raise ReportError(f"the traces of {billed - arrived} of the month's {billed} requests are gone: see --partial")
    return [row for row in rows if (row.amount_nano or 0) < 0] if args.partial else rows


def _list(args: argparse.Namespace) -> int:
    with LedgerReader(ledger_place(args)) as reader:
        for row in reader.credits():
            key = key_of(row)
            who = f"{row.tenant} {row.team} {row.key_id} {row.served_model}"
            amount = format_money(-(row.amount_nano or 0))
            print(f"{utc_text(row.posted_ns)}  {key.rule}  {key.period}  {who}  {amount} {row.currency}")
    return 0
