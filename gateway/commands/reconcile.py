"""``keepwarm reconcile``: the ledger against an engine's own counters, and against a provider's invoice."""

from __future__ import annotations

import argparse
import sys
import time
from decimal import Decimal, InvalidOperation
from io import StringIO
from pathlib import Path

from billing.errors import BillingError, ReconcileError
from billing.ledger_read import LedgerReader, RowFilter
from billing.reconcile import InvoiceColumns, Line, engine_counts, read_invoice, render, with_engine, with_invoice
from billing.reconcile_counts import compare_counts, render_counts
from billing.reports import Sums
from gateway.commands.arguments import text_of, told
from gateway.commands.report import add_ledger_arguments, ledger_place, parse_moment
from gateway.errors import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    engine = actions.add_parser("engine", help="with what an engine's /metrics rose by (SGLang, vLLM)")
    engine.add_argument("--instance", required=True, help="as the settings name it")
    engine.add_argument("--before", type=Path, metavar="FILE", help="its /metrics at the beginning (default: 0)")
    engine.add_argument("--after", type=Path, required=True, metavar="FILE", help="its /metrics at the end")
    invoice = actions.add_parser("invoice", help="with a provider's invoice, by day and model")
    invoice.add_argument("file", type=Path, metavar="CSV")
    invoice.add_argument("--currency", default="USD")
    for name in InvoiceColumns.__dataclass_fields__:
        default = getattr(InvoiceColumns(), name)
        option = f"--{name.replace('_', '-')}-column"
        invoice.add_argument(option, default=default, metavar="NAME", help=f"default: {default or 'not compared'}")
    counts = actions.add_parser("counts", help="the gateway's own prompt counts with the engines', and all alarms")
    add_ledger_arguments(parser, engine, invoice, counts)
    for action in (engine, invoice, counts):
        action.add_argument("--since", metavar="TIME", help="the period, as for keepwarm report")
        action.add_argument("--until", metavar="TIME")
        action.add_argument("--tolerance", default="0", metavar="SHARE", help="0.001: a thousandth counts as equal")


def run(args: argparse.Namespace) -> int:
    """Compare; return the exit status: 0 when all that both say agrees."""
    try:
        tolerance = _share(args.tolerance)
        if args.action == "counts":
            with LedgerReader(ledger_place(args)) as reader:
                found = compare_counts(reader.rows(_period(args)))
            print(render_counts(found), end="")
            return 0 if all(sums.agrees for sums in found.values()) else 1
        lines = _engine(args) if args.action == "engine" else _invoice(args)
        print(render(lines, tolerance))
        return 0 if all(line.theirs is None or line.agrees(tolerance) for line in lines) else 1
    except BrokenPipeError:
        raise  # no fault of what is compared: see ``gateway.cli``
    except (BillingError, SettingsError, OSError) as error:
        print(f"keepwarm reconcile: {told(error)}", file=sys.stderr)
        return 1


def _share(text: str) -> Decimal:
    try:
        share = Decimal(text)
    except InvalidOperation:
        share = Decimal("NaN")
    if not (share.is_finite() and 0 <= share <= 1):
        raise ReconcileError(f"--tolerance {text}: it is a share between 0 and 1")
    return share


def _period(args: argparse.Namespace) -> RowFilter:
    now_ns = time.time_ns()
    since, until = (None if text is None else parse_moment(text, now_ns) for text in (args.since, args.until))
    return RowFilter(since_ns=since, until_ns=until)


def _engine(args: argparse.Namespace) -> list[Line]:
    before = {} if args.before is None else engine_counts(text_of(args.before))
    after = engine_counts(text_of(args.after))
    sums = Sums()
    with LedgerReader(ledger_place(args)) as reader:
        for group in reader.report(("instance", "usage_source"), _period(args)).groups:
            if group.key[0] == args.instance and group.key[1] != "none":
                sums.add(group.sums)
    return with_engine(sums, before, after)


def _invoice(args: argparse.Namespace) -> list[Line]:
    names = {name: getattr(args, f"{name}_column") for name in InvoiceColumns.__dataclass_fields__}
    invoice = read_invoice(StringIO(text_of(args.file), newline=""), InvoiceColumns(**names))
    if not invoice:
        raise ReconcileError(f"{args.file} holds no lines")
    with LedgerReader(ledger_place(args)) as reader:
        return with_invoice(reader.report(("day", "served_model"), _period(args)), invoice, args.currency)
