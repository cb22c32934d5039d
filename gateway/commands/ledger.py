"""``keepwarm ledger``: verify it, close periods, correct what was billed wrongly, remove what is closed and old.

Nothing in it is ever changed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from billing.corrections import correct
from billing.database import Place
from billing.errors import BillingError, PeriodError
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader, RowFilter
from billing.periods import close_period, closings, post
from billing.prices import PriceBook
from billing.reports import format_money
from billing.retention import month_start_ns, remove_rows
from billing.row import LedgerRow
from billing.settlement import settle_open_months
from billing.shelf import PriceShelf
from billing.storage import storage_rows
from billing.storage_leases import read_leases
from billing.tables import counted
from billing.verify import verify_ledger
from gateway.access.errors import AccessError
from gateway.assembly import price_shelf
from gateway.commands.arguments import text_of, told, whole_number
from gateway.commands.report import add_ledger_arguments, ledger_place, parse_moment, utc_text
from gateway.errors import SettingsError
from gateway.settings.arguments import settings_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    verify = actions.add_parser("verify", help="compute every amount again; exit 1 if anything differs")
    close = actions.add_parser("close", help="close everything before an instant: later rows are posted after it")
    close.add_argument("until", metavar="TIME", help="2026-11-01 (UTC) or another moment that is over")
    periods = actions.add_parser("periods", help="list what was closed")
    text = "post, as new rows, what requests should have cost by a price book less what they did"
    reprice = actions.add_parser("reprice", help=text)
    reprice.add_argument("--prices", type=Path, required=True, metavar="FILE", help="the right price book")
    reprice.add_argument("--reason", required=True, help="why, for whoever reads the rows later")
    reprice.add_argument("--since", metavar="TIME", help="requests of this period (by accounting date)")
    reprice.add_argument("--until", metavar="TIME")
    reprice.add_argument("--request", metavar="ID", help="only this request")
    reprice.add_argument("--unpriced", action="store_true", help="only requests that have no price yet")
    reprice.add_argument("--dry-run", action="store_true", help="say what it comes to and write nothing")
    text = "post what keeping prompts cached has cost, by the hour, from a provider's list of them"
    storage = actions.add_parser("storage", help=text)
    storage.add_argument("file", type=Path, metavar="FILE", help="CSV, or JSON as Gemini's API lists cached contents")
    storage.add_argument("--prices", type=Path, metavar="FILE", help="the price book (default: those of the settings)")
    for who in ("tenant", "team", "key"):
        storage.add_argument(f"--{who}", default="default", metavar="NAME", help="whose, where the file does not say")
    storage.add_argument("--dry-run", action="store_true", help="say what it comes to and write nothing")
    remove = actions.add_parser("remove", help="remove the rows of closed, old months; their sums stay")
    which = remove.add_mutually_exclusive_group()
    which.add_argument("--before", metavar="TIME", help="the first instant of a month (UTC): 2026-01-01")
    text = "keep this month and N before it"
    which.add_argument("--keep-months", type=whole_number(0, 1200), metavar="N", help=text)
    migrate = actions.add_parser("migrate", help="make or bring up the tables of a ledger in PostgreSQL")
    migrate.add_argument("--grant", metavar="ROLE", help="then let this role run gateways, and no more")
    add_ledger_arguments(parser, verify, close, periods, reprice, storage, remove, migrate)


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status: 0, or 1 when it could not be done or does not verify."""
    try:
        place = ledger_place(args)
        match args.action:
            case "verify":
                return _verify(place)
            case "close":
                return _close(place, args.until)
            case "periods":
                return _periods(place)
            case "remove":
                return _remove(place, args)
            case "storage":
                return _storage(place, args)
            case "migrate":
                return _migrate(place, args.grant)
            case _:
                return _reprice(place, args)
    except BrokenPipeError:
        raise  # no fault of the ledger's: see ``gateway.cli``
    except (BillingError, SettingsError, AccessError, OSError) as error:
        print(f"keepwarm ledger: {told(error)}", file=sys.stderr)
        return 1


def _verify(place: Place) -> int:
    verification = verify_ledger(place)
    for fault in verification.faults:
        print(f"keepwarm ledger: {fault}", file=sys.stderr)
    print(f"verified {verification.told()}")
    return 0 if verification.passed else 1


def _close(place: Place, until: str) -> int:
    now_ns = time.time_ns()
    until_ns = parse_moment(until, now_ns)
    if settled := settle_open_months(place, min(until_ns, now_ns), now_ns):
        print(f"{counted(len(settled), 'credit')} for free allowances")
    closing = close_period(place, until_ns, now_ns)
    print(f"closed until {utc_text(closing.until_ns)}")
    for total in closing.totals:
        print(f"  {total.currency} {format_money(total.amount_nano)}  {counted(total.requests, 'request')}")
    return 0


def _periods(place: Place) -> int:
    with LedgerReader(place) as reader:
        for closing in closings(reader):
            sums = ", ".join(f"{t.currency} {format_money(t.amount_nano)}" for t in closing.totals)
            print(f"until {utc_text(closing.until_ns)}  closed {utc_text(closing.closed_ns)}  {sums}")
    return 0


def _reprice(place: Place, args: argparse.Namespace) -> int:
    book, now_ns = PriceBook.load(args.prices), time.time_ns()
    where = RowFilter(
        since_ns=None if args.since is None else parse_moment(args.since, now_ns),
        until_ns=None if args.until is None else parse_moment(args.until, now_ns),
        request_id=args.request,
    )
    rows: list[LedgerRow] = []
    with LedgerReader(place) as reader:
        for history in _histories(reader, where, unpriced_only=args.unpriced):
            try:
                row = correct(history, book, reason=args.reason, at_ns=now_ns)
            except BillingError as error:
                print(f"keepwarm ledger: {error}", file=sys.stderr)
                continue
            if row is not None:
                rows.append(row)
    change = sum(row.amount_nano or 0 for row in rows)
    print(f"{counted(len(rows), 'correction')}, together {format_money(change)} {book.currency}")
    if rows and not args.dry_run:
        Ledger(place).register(book)
        post(place, rows)
    return 0


def _storage(place: Place, args: argparse.Namespace) -> int:
    leases = read_leases(text_of(args.file), tenant=args.tenant, team=args.team, key_id=args.key)
    shelf = price_shelf(settings_of(args)) if args.prices is None else PriceShelf(PriceBook.load(args.prices))
    with LedgerReader(place) as reader:
        removal = reader.removal()
        kept_ns = 0 if removal is None else removal.before_ns
        rows = storage_rows(leases, shelf.book_for, reader.storage(), time.time_ns(), kept_ns)
    for currency in sorted({row.currency for row in rows}):
        chosen = [row.amount_nano or 0 for row in rows if row.currency == currency]
        print(f"{counted(len(chosen), 'row')} of storage, together {format_money(sum(chosen))} {currency}")
    if not rows:
        print("nothing to post")
    elif not args.dry_run:
        ledger = Ledger(place)
        for book in shelf.books:
            ledger.register(book)
        post(place, rows)
    return 0


def _remove(place: Place, args: argparse.Namespace) -> int:
    now_ns = time.time_ns()
    months = args.keep_months
    if args.before is None and months is None:
        months = settings_of(args).ledger.keep_months
    if args.before is not None:
        before_ns = parse_moment(args.before, now_ns)
    elif months is not None:
        before_ns = month_start_ns(now_ns, months)
    else:
        raise PeriodError(
            "say what may go: --before 2026-01-01, --keep-months 13, or ledger.keep_months in the settings"
        )
    removal, rows = remove_rows(place, before_ns, now_ns)
    print(f"{counted(rows, 'row')} removed; all that was posted before {utc_text(removal.before_ns)} is kept as sums")
    for total in removal.totals:
        print(f"  {total.currency} {format_money(total.amount_nano)}  {counted(total.requests, 'request')}")
    return 0


def _migrate(place: Place, role: str | None) -> int:
    if isinstance(place, Path):
        raise SettingsError(f"{place} is a file: it is brought up when a gateway opens it")
    from billing.postgres.database import PostgresDatabase  # the extra 'postgres', which a server's place came with
    from gateway.access.postgres import postgres_access

    before, after = place.migrate(role)
    if isinstance(place, PostgresDatabase):
        postgres_access(place.url.render_as_string(hide_password=False)).migrate(role)  # keys lie beside the ledger
    print(
        f"{place.name}: schema {before or 'none'} -> {after}" + ("" if role is None else f"; {role} may run gateways")
    )
    return 0


def _histories(reader: LedgerReader, where: RowFilter, *, unpriced_only: bool) -> Iterator[list[LedgerRow]]:
    corrected = set(reader.corrected())
    for row in reader.rows(where):
        if row.revision:
            continue
        history = reader.history(row.request_id) if row.request_id in corrected else [row]
        if not unpriced_only or all(part.amount_nano is None for part in history):
            yield history
