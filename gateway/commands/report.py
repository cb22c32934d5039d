"""``keepwarm report``: what was spent and saved, by any dimension, from the ledger alone."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from pathlib import Path

from billing.attribution import UNITS, attribute
from billing.database import Place
from billing.errors import BillingError, ReportError
from billing.focus import FocusOptions, export
from billing.focus_check import focus_faults
from billing.goodput import Objective, goodput, render_goodput
from billing.ledger_read import LedgerReader, RowFilter
from billing.report_html import render_html
from billing.reports import DIMENSIONS, format_money, render_csv, render_json, render_table
from billing.statement import render_statement, render_statement_csv, statement, statement_json
from billing.tables import counted
from billing.unit_cost import render_unit_costs, unit_costs
from billing.verify import verify_ledger
from gateway.assembly import ledger_at
from gateway.assembly import ledger_place as ledger_place_of
from gateway.commands.arguments import seconds, whole_number
from gateway.commands.baseline import add_baseline_arguments, load, render_baseline, replay
from gateway.commands.moments import parse_moment, utc_text
from gateway.commands.traces import add_traces_argument, trace_place
from gateway.errors import SettingsError
from gateway.replay.errors import ReplayError
from gateway.settings.arguments import add_settings_arguments, add_to_all, settings_of
from tracing.errors import TracingError

__all__ = ["add_arguments", "add_ledger_arguments", "ledger_place", "parse_moment", "run", "utc_text"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_ledger_arguments(parser)
    parser.add_argument(
        "--by",
        default="",
        metavar="DIM[,DIM…]",
        help=f"group by these: {', '.join(DIMENSIONS)}, label:NAME (default: totals only)",
    )
    moment = "2026-11-01, 2026-11-01T08:00Z, or 30m, 24h, 7d ago (by arrival; without a zone: UTC)"
    parser.add_argument("--since", metavar="TIME", help=f"only what is posted at or after it: {moment}")
    parser.add_argument("--until", metavar="TIME", help="only what is posted before it")
    parser.add_argument("--run", metavar="RUN_ID", help="only the requests of this run")
    text = "only the first N groups, the costliest or the earliest; totals are of all"
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help=text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--html", action="store_true", help="print a page with charts")
    form.add_argument("--runs", action="store_true", help="print what a run of each agent costs, as a distribution")
    form.add_argument("--goodput", action="store_true", help="print how many requests met their key's objectives")
    form.add_argument("--focus", action="store_true", help="print a FOCUS 1.2 Cost and Usage dataset (CSV)")
    parser.add_argument("--statement", action="store_true", help="showback and chargeback of a unit; also as JSON, CSV")
    parser.add_argument(
        "--ttft", type=seconds, metavar="S", help="--goodput: for keys without an objective of their own"
    )
    parser.add_argument("--tpot", type=seconds, metavar="S", help="--goodput: likewise, for each further token")
    parser.add_argument("--detail", action="store_true", help="--focus: a line for each run")
    parser.add_argument("--currency", metavar="CODE", help="--focus, --statement: which, of several")
    parser.add_argument("--issuer", default="Platform team", metavar="NAME", help="--focus: InvoiceIssuerName")
    add_traces_argument(parser)
    add_baseline_arguments(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="first compute every amount in the ledger again from its tokens and price version; exit 1 if one differs",
    )


def add_ledger_arguments(parser: argparse.ArgumentParser, *actions: argparse.ArgumentParser) -> None:
    """Declare how a command is told which ledger: before its action or behind it."""
    text = "the ledger to read (default: the settings' one)"
    add_to_all("--ledger", parser, actions, metavar="PATH|URL", help=text)
    add_settings_arguments(parser, *actions)


def run(args: argparse.Namespace) -> int:
    """Print the report; return the exit status: 0, or 1 when the ledger is missing, unreadable or does not verify."""
    gc.disable()  # half a million groups are no garbage, and the collector would walk them again and again
    try:
        return _report(args)
    except (BillingError, SettingsError, TracingError, ReplayError) as error:
        print(f"keepwarm report: {error}", file=sys.stderr)
        return 1
    finally:
        gc.enable()


def ledger_place(args: argparse.Namespace) -> Place:
    """Return the ledger that the arguments name. Raises ``SettingsError``, ``LedgerError``."""
    settings = settings_of(args)  # first: what is wrong in them is told whatever else is named
    if args.ledger is None:
        return ledger_place_of(settings)
    return ledger_at(args.ledger, settings.ledger_journal_path) if "://" in args.ledger else Path(args.ledger)


def _report(args: argparse.Namespace) -> int:
    now_ns = time.time_ns()
    where = RowFilter(
        since_ns=None if args.since is None else parse_moment(args.since, now_ns),
        until_ns=None if args.until is None else parse_moment(args.until, now_ns),
        run_id=args.run,
    )
    if args.limit is not None and (args.focus or args.goodput or args.statement or args.runs):
        raise ReportError("--limit is for groups: --focus, --goodput, --statement and --runs tell all there is")
    place = ledger_place(args)
    if args.verify:
        verification = verify_ledger(place)
        for fault in verification.faults:
            print(f"keepwarm report: {fault}", file=sys.stderr)
        print(f"verified {verification.told()}", file=sys.stderr)
        if not verification.passed:
            return 1
    if args.baseline != "none":
        traces = trace_place(args)
        print(render_baseline(replay(args, *load(place, traces, where.since_ns, where.until_ns)), args.by), end="")
        return 0
    if args.focus:
        return _focus(place, where, args)
    if args.goodput:
        return _goodput(place, where, args)
    if args.statement:
        return _statement(place, where, args)
    if args.runs:
        with LedgerReader(place) as reader:
            print(render_unit_costs(unit_costs(reader.report(("agent", "run"), where))), end="")
        return 0
    with LedgerReader(place) as reader:
        report = reader.report([name for name in args.by.split(",") if name], where)
    if args.limit is not None and args.limit < len(report.groups):
        print(f"{args.limit:,} of {counted(len(report.groups), 'group')}", file=sys.stderr)
        report = report.first(args.limit)
    if args.json:
        print(render_json(report))
    elif args.html:
        print(render_html(report, f"keepwarm report by {args.by}" if args.by else "keepwarm report"), end="")
    elif args.csv:
        print(render_csv(report), end="")
    else:
        print(render_table(report), end="")
    return 0


def _goodput(place: Place, where: RowFilter, args: argparse.Namespace) -> int:
    objectives = {
        key.id: objective_of(key.ttft_objective_s or args.ttft, key.tpot_objective_s or args.tpot)
        for key in settings_of(args).keys
    }
    span_ns = None if where.since_ns is None or where.until_ns is None else where.until_ns - where.since_ns
    by = [name for name in args.by.split(",") if name]
    with LedgerReader(place) as reader:
        reader.check_kept(where)
        found = goodput(reader.rows(where), by, objectives, objective_of(args.ttft, args.tpot), span_ns)
    print(render_goodput(found), end="")
    return 0


def objective_of(ttft_s: float | None, tpot_s: float | None) -> Objective:
    """Return an objective of seconds."""
    ttft_ns, tpot_ns = (None if seconds is None else round(seconds * 1e9) for seconds in (ttft_s, tpot_s))
    return Objective(ttft_ns, tpot_ns)


def _statement(place: Place, where: RowFilter, args: argparse.Namespace) -> int:
    by, transfers = args.by or "team", dict[str, int]()
    with LedgerReader(place) as reader:
        currency = _one_currency(reader, where, args)
        books = reader.price_books()
        dataset = export(reader.rows(where), books, currency)
        if by in UNITS and any(book.file.prefix_writes == "readers" for book in books.values()):
            traces = trace_place(args)
            records, _ = load(place, traces, where.since_ns, where.until_ns)
            units = attribute(records, books, unit=by).units
            transfers = {name: sums.transfer_nano for (name, each), sums in units.items() if each == currency}
        found = statement(reader.rows(where), dataset, by, transfers)
    if args.json:
        print(json.dumps(statement_json(found, by, currency), indent=2, ensure_ascii=False))
    else:
        print((render_statement_csv if args.csv else render_statement)(found, by, currency), end="")
    return 0


def _one_currency(reader: LedgerReader, where: RowFilter, args: argparse.Namespace) -> str:
    """Return the currency of a dataset or a statement. Raises ``ReportError`` where there are several."""
    reader.check_kept(where)
    if args.currency is not None and not re.fullmatch("[A-Z]{3}", args.currency):
        raise ReportError(f"--currency {args.currency!r}: a currency is three capital letters, such as USD")
    currencies = [total.currency for total in reader.totals(where)]
    if args.currency is None and len(currencies) > 1:
        raise ReportError(f"this is told in one currency: --currency {' or '.join(currencies)}")
    return args.currency or (currencies[0] if currencies else "USD")


def _focus(place: Place, where: RowFilter, args: argparse.Namespace) -> int:
    with LedgerReader(place) as reader:
        currency = _one_currency(reader, where, args)
        options = FocusOptions(issuer=args.issuer, detail=args.detail)
        dataset = export(reader.rows(where), reader.price_books(), currency, options)
    faults = focus_faults(dataset.lines(), dataset.billed_nano, currency)
    for fault in faults[:100]:
        print(f"keepwarm report: {fault}", file=sys.stderr)
    lines = dataset.write(sys.stdout)
    told = f"{counted(lines, 'line')}, {counted(dataset.requests, 'request')}"
    unpriced = f"{counted(dataset.unpriced, 'request')} without a price and a line"
    print(f"{told}, {format_money(dataset.billed_nano)} {currency}; {unpriced}", file=sys.stderr)
    return 1 if faults else 0
