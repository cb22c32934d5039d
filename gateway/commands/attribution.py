"""``keepwarm attribution``: who computed what others read, what was lost and wasted, and what it saved, from traces.

It reads the trace store, whose records say which prefixes prompts had, and the ledger, which has the price versions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping

from billing.attribution import UNITS, attribute
from billing.attribution_text import attribution_json, render_attribution
from billing.errors import BillingError
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from gateway.commands.baseline import add_baseline_arguments, baseline_json, render_baseline, replay
from gateway.commands.report import add_ledger_arguments, ledger_place, parse_moment
from gateway.commands.traces import add_restart_argument, add_traces_argument, opened_traces, told_restarts
from gateway.errors import SettingsError
from gateway.replay.errors import ReplayError
from tracing.errors import TracingError
from tracing.record import RequestRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_ledger_arguments(parser)
    add_traces_argument(parser)
    parser.add_argument("--by", default="team", choices=sorted(UNITS), help="between whom (default: %(default)s)")
    parser.add_argument("--since", metavar="TIME", help="requests that arrived at or after it")
    parser.add_argument("--until", metavar="TIME", help="requests that arrived before it")
    add_restart_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_baseline_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print it; return the exit status."""
    try:
        records, books, lives = load_asked(args)
        found = attribute(records, books, unit=args.by, restarts=told_restarts(args, lives))
        baseline = None if args.baseline == "none" else replay(args, records, books)
    except (BillingError, SettingsError, TracingError, ReplayError) as error:
        print(f"keepwarm attribution: {error}", file=sys.stderr)
        return 1
    if args.json:
        content = attribution_json(found)
        if baseline is not None:
            content["baseline"] = baseline_json(baseline)
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return 0
    print(render_attribution(found), end="")
    if baseline is not None:
        print("\n" + render_baseline(baseline, args.by), end="")
    return 0


def load_asked(
    args: argparse.Namespace,
) -> tuple[list[RequestRecord], dict[str, PriceBook], Mapping[str, tuple[int, ...]]]:
    """Return the records of the time asked for in order of arrival, all price versions, and when engines began anew."""
    now_ns = time.time_ns()
    since, until = (None if text is None else parse_moment(text, now_ns) for text in (args.since, args.until))
    with LedgerReader(ledger_place(args)) as reader:
        books = reader.price_books()
    store = opened_traces(args)
    try:
        return list(store.arrived(since, until)), books, store.lives(since, until)
    finally:
        store.close()
