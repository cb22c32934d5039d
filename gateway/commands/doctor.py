"""``keepwarm doctor``: which hits agents lost, why, what that cost and what would mend it, from traces and ledger."""

from __future__ import annotations

import argparse
import json
import sys
import time

from billing.errors import BillingError
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from gateway.commands.arguments import whole_number
from gateway.commands.report import add_ledger_arguments, ledger_place, parse_moment
from gateway.commands.traces import add_restart_argument, add_traces_argument, opened_traces, told_restarts
from gateway.diagnosis.cards import BreakCard, diagnose
from gateway.diagnosis.doctor import doctor_json, render_doctor
from gateway.errors import SettingsError
from tracing.errors import TracingError
from tracing.record import RequestRecord
from tracing.store import RunFilter, TraceStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run_id", nargs="?", metavar="RUN", help="one run, or 'last' (default: all of a time)")
    add_ledger_arguments(parser)
    add_traces_argument(parser)
    parser.add_argument(
        "--since", default="24h", metavar="TIME", help="requests that came since (default: %(default)s)"
    )
    parser.add_argument("--until", metavar="TIME", help="requests that came before it")
    parser.add_argument("--agent", metavar="NAME", help="only this agent's")
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    parser.add_argument("--limit", type=whole_number(1), default=10, metavar="N", help="(default: %(default)s)")
    add_restart_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print it; 0, or 1 where something cannot be read or there is no such run."""
    try:
        store = opened_traces(args)
        try:
            with LedgerReader(ledger_place(args)) as reader:
                books = reader.price_books()
            found = _cards(store, books, args)
        finally:
            store.close()
    except (BillingError, SettingsError, TracingError) as error:
        print(f"keepwarm doctor: {error}", file=sys.stderr)
        return 1
    if found is None:
        print(f"keepwarm doctor: there is no run {args.run_id!r}", file=sys.stderr)
        return 1
    cards, steps = found
    if args.json:
        print(json.dumps(doctor_json(cards, steps, limit=args.limit), indent=2, ensure_ascii=False))
    else:
        print(render_doctor(cards, steps, limit=args.limit), end="")
    return 0


def _cards(
    store: TraceStore, books: dict[str, PriceBook], args: argparse.Namespace
) -> tuple[list[BreakCard], int] | None:
    """Return the cards asked for and how many steps were looked at; ``None`` where there is no such run.

    What a run could have hit is judged by everything that came in its time, its neighbours' requests included.
    """
    now_ns = time.time_ns()
    since_ns: int | None = max(parse_moment(args.since, now_ns), 0)
    until_ns = None if args.until is None else parse_moment(args.until, now_ns)
    run: list[RequestRecord] = []
    if args.run_id is not None:
        run = _run(store, args.run_id, args.tenant)
        if not run:
            return None
        since_ns, until_ns = run[0].stamps.arrived_ns, max(each.stamps.arrived_ns for each in run) + 1
    records = list(store.arrived(since_ns, until_ns))
    ids = [record.request_id for record in records]
    restarts = told_restarts(args, store.lives(since_ns, until_ns))
    cards = diagnose(records, store.details(ids), books, restarts=restarts)
    wanted = {record.request_id for record in run or records if _is_wanted(record, args)}
    return [card for card in cards if card.request_id in wanted], len(wanted)


def _is_wanted(record: RequestRecord, args: argparse.Namespace) -> bool:
    is_agents = args.agent is None or record.labels.get("agent") == args.agent
    return is_agents and args.tenant in (None, record.identity.tenant)


def _run(store: TraceStore, run_id: str, tenant: str | None) -> list[RequestRecord]:
    if run_id != "last":
        return store.run(run_id, tenant)
    newest = store.runs(1, RunFilter(tenant=tenant))
    return store.run(newest[0].run_id, newest[0].tenant) if newest else []
