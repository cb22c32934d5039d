"""``keepwarm whatif``: what a run, or a time, would have hit and cost under other caches, policies, prompts, prices."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from billing.errors import BillingError
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from gateway.commands.replay import parse_size
from gateway.commands.report import add_ledger_arguments, ledger_place, parse_moment
from gateway.commands.traces import add_traces_argument, opened_traces
from gateway.errors import SettingsError
from gateway.replay.errors import ReplayError
from gateway.replay.performance import PRESETS
from gateway.routing import POLICIES
from gateway.whatif.question import Question, answer
from gateway.whatif.report import content, render
from tracing.errors import TracingError

_DURATION = re.compile(r"(\d{1,6})([smhd])")
_UNIT_NS = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run_id", nargs="?", metavar="RUN_ID", help="a run; without it the requests of a time")
    add_ledger_arguments(parser)
    add_traces_argument(parser)
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's requests")
    parser.add_argument("--since", metavar="TIME", help="requests that arrived at or after it")
    parser.add_argument("--until", metavar="TIME", help="requests that arrived before it")
    parser.add_argument(
        "--keep", metavar="DURATION[,…]", help="how long prefixes stay after their last use (default: 5m,1h,24h)"
    )
    parser.add_argument(
        "--prices", action="append", default=[], metavar="FILE", help="another price book, or 'default'; repeatable"
    )
    fleet = parser.add_argument_group("simulated: other policies and a larger host tier, beside the fleet as it was")
    fleet.add_argument("--policy", metavar="NAME[,…]", help=f"of {', '.join(POLICIES)}, or all")
    fleet.add_argument("--more-host-bytes", type=parse_size, metavar="SIZE", help="host memory to add to each instance")
    fleet.add_argument("--engine", default="llama8b-h100", choices=sorted(PRESETS), help="how fast engines are")
    fleet.add_argument("--device-tokens", type=parse_size, metavar="SIZE", help="what each keeps on its device")
    parser.add_argument("--limit", type=int, default=200_000, metavar="N", help="requests to play (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print it; return the exit status."""
    try:
        with LedgerReader(ledger_place(args)) as reader:
            books = reader.price_books()
        traces = opened_traces(args)
        try:
            found = answer(_question(args), traces, books)
        finally:
            traces.close()
    except (BillingError, SettingsError, TracingError, ReplayError) as error:
        print(f"keepwarm whatif: {error}", file=sys.stderr)
        return 1
    text = json.dumps(content(found), indent=2, ensure_ascii=False) + "\n" if args.json else render(found)
    print(text, end="")
    return 0


def _question(args: argparse.Namespace) -> Question:
    now_ns = time.time_ns()
    keep = None if args.keep is None else {text: _duration_ns(text) for text in args.keep.split(",") if text}
    policies = tuple(POLICIES) if args.policy == "all" else tuple(filter(None, (args.policy or "").split(",")))
    books = [(name, PriceBook.default() if name == "default" else PriceBook.load(Path(name))) for name in args.prices]
    host_tokens = (args.more_host_bytes or 0) // PRESETS[args.engine].kv_bytes_per_token
    return Question(
        run_id=args.run_id,
        tenant=args.tenant,
        since_ns=None if args.since is None else parse_moment(args.since, now_ns),
        until_ns=None if args.until is None else parse_moment(args.until, now_ns),
        retentions=keep,
        policies=policies,
        more_host_tokens=host_tokens,
        engine=args.engine,
        device_tokens=args.device_tokens,
        other_books=tuple((Path(name).stem, book) for name, book in books),
        limit=args.limit,
    )


def _duration_ns(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SettingsError(f"--keep {text!r}: write 90s, 5m, 1h or 7d")
    return int(match[1]) * _UNIT_NS[match[2]]
