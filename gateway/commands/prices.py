"""``keepwarm prices``: check and show price books, and run worked examples through the meter."""

from __future__ import annotations

import argparse
import sys
import time
from decimal import Decimal
from pathlib import Path

from billing.cases import load_cases, render_results, run_case
from billing.errors import BillingError, PriceBookError
from billing.price_diff import diff
from billing.price_file import PriceEntry
from billing.price_import import import_genai_prices
from billing.prices import PriceBook
from billing.rates import PRICE_DECIMALS, NoPrice
from billing.reports import format_money
from billing.self_hosted import TIERS, HostingCost, Throughput, self_hosted_book
from billing.shelf import PriceShelf
from billing.tables import counted
from gateway.assembly import price_shelf
from gateway.commands.arguments import exact_number
from gateway.commands.moments import parse_moment
from gateway.errors import SettingsError
from gateway.settings.arguments import add_settings_arguments, settings_of
from gateway.settings.whole import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="validate price books; every problem is named with its path in the file")
    check.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: those that the settings name")
    show = actions.add_parser("show", help="show a price book, or the one price that a request would get")
    show.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: those of the settings")
    show.add_argument("--model", help="show the rates of a request to this model")
    show.add_argument("--at", metavar="TIME", help="… that arrived then (default: now)")
    show.add_argument("--prompt-tokens", type=int, default=0, metavar="N", help="… with a prompt of this length")
    show.add_argument("--team", help="… from this team")
    show.add_argument("--region", help="… in this region")
    show.add_argument("--service-tier", help="… in this service tier")
    show.add_argument("--instance", help="… answered by this one, where books are for some instances only")
    add_settings_arguments(parser, check, show)
    diff_ = actions.add_parser("diff", help="say what differs between two price books; exit 1 if anything does")
    diff_.add_argument("before", type=Path, metavar="BEFORE")
    diff_.add_argument("after", type=Path, metavar="AFTER")
    import_ = actions.add_parser("import", help="print a price book made of the public data set genai-prices")
    import_.add_argument("provider", metavar="PROVIDER", help="openai, anthropic, google, deepseek …")
    hosted = actions.add_parser("from-gpu-hours", help="print a price book for engines of your own")
    hosted.add_argument("--model", required=True, help="as instances name it; * and ? as in file names")
    hosted.add_argument("--gpu-hour", required=True, type=exact_number, metavar="MONEY", help="what one GPU costs")
    hosted.add_argument("--gpus", type=int, default=1, metavar="N", help="of one instance (default: %(default)s)")
    hosted.add_argument(
        "--prefill-tokens-per-s", required=True, type=int, metavar="N", help="of one instance, measured"
    )
    hosted.add_argument("--decode-tokens-per-s", required=True, type=int, metavar="N", help="all its requests together")
    hosted.add_argument(
        "--hit-tokens-per-s", action="append", default=[], metavar="TIER=N", help=f"of {', '.join(TIERS)}; repeatable"
    )
    hosted.add_argument(
        "--utilization", type=exact_number, default=Decimal(1), metavar="SHARE", help="of the paid time (1)"
    )
    hosted.add_argument("--margin", type=exact_number, default=Decimal(0), metavar="SHARE", help="on top (0)")
    hosted.add_argument("--currency", default="USD", metavar="CODE")
    cases = actions.add_parser("verify-cases", help="price worked examples; exit 0 only if all agree to the last digit")
    cases.add_argument("file", type=Path, metavar="FILE", help="JSON, as described in billing/cases.py")


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status: 0, or 1 when something is wrong with a book or a case."""
    try:
        match args.action:
            case "check":
                return _check(args.files or _named_files(settings_of(args)))
            case "show":
                return _show(args)
            case "diff":
                return _diff(args.before, args.after)
            case "import":
                return _import(args.provider)
            case "from-gpu-hours":
                return _from_gpu_hours(args)
            case _:
                return _verify_cases(args.file)
    except (BillingError, SettingsError) as error:
        print(f"keepwarm prices: {error}", file=sys.stderr)
        return 1


def _named_files(settings: Settings) -> list[Path]:
    """Return the price books of the settings. Raises ``SettingsError`` where they name none."""
    billing = settings.billing
    named = [path for path in (billing.prices, *(book.prices for book in billing.books)) if path is not None]
    if not named:
        raise SettingsError("the settings name no price book, so the packaged one holds: name a FILE")
    return named


def _check(files: list[Path]) -> int:
    status = 0
    for path in files:
        try:
            book = PriceBook.load(path)
        except BillingError as error:
            print(error, file=sys.stderr)
            status = 1
        else:
            prices = counted(len(book.file.price), "price")
            print(f"{path}: {book.name}, {prices} in {book.currency}, version {book.version}")
    return status


def _show(args: argparse.Namespace) -> int:
    shelf = price_shelf(settings_of(args)) if args.file is None else PriceShelf(PriceBook.load(args.file))
    if args.model is None:
        print("\n".join(map(_described, shelf.books)))
        return 0
    book = shelf.book_for(args.model, args.instance)
    print(_heading(book))
    now_ns = time.time_ns()
    at_ns = now_ns if args.at is None else parse_moment(args.at, now_ns)
    card = book.card(
        args.model,
        at_ns,
        args.prompt_tokens,
        team=args.team,
        region=args.region,
        service_tier=args.service_tier,
    )
    if isinstance(card, NoPrice):
        print(f"unpriced: {card.reason}")
        return 1
    print(card.rule)
    for name, rate in card.rates.items():
        print(f"  {name:<12} {_decimal(rate)}")
    if card.request_fee_nano:
        print(f"  a request    {format_money(card.request_fee_nano)}")
    if card.request_minimum_nano:
        print(f"  at least     {format_money(card.request_minimum_nano)} a request")
    for tool, fee in card.tool_fees_nano.items():
        print(f"  {tool:<12} {format_money(fee)} for each use")
    storage = book.storage_rate(args.model, at_ns, args.team, args.region)
    if isinstance(storage, int):
        print(f"  storage      {_decimal(storage)} an hour")
    terms = book.cache_terms(args.model, at_ns, args.team, args.region)
    if terms.minimum_tokens:
        print(f"  cached       from {terms.minimum_tokens} tokens on")
    if terms.lifetime_s is not None:
        print(f"  kept         {terms.lifetime_s} s after its last use")
    return 0


def _diff(before: Path, after: Path) -> int:
    lines = diff(PriceBook.load(before), PriceBook.load(after))
    for line in lines:
        print(line)
    return 1 if lines else 0


def _import(provider: str) -> int:
    try:
        imported = import_genai_prices(provider)
    except ImportError:
        print("keepwarm prices: this needs the extra 'prices': pip install 'keepwarm[prices]'", file=sys.stderr)
        return 1
    book = PriceBook.from_toml(imported.toml, f"genai-prices {provider}")
    for line in imported.left_out:
        print(f"left out: {line}", file=sys.stderr)
    told = f"{counted(imported.models, 'model')}, {counted(len(book.file.price), 'price')}"
    print(f"{told}, version {book.version}", file=sys.stderr)
    print(imported.toml)
    return 0


def _from_gpu_hours(args: argparse.Namespace) -> int:
    hits = {}
    for text in args.hit_tokens_per_s:
        tier, _, speed = text.partition("=")
        if not speed.isdecimal():
            raise PriceBookError("from GPU hours", [f"{text!r}: write TIER=N, as in host=200000"])
        hits[tier] = int(speed)
    cost = HostingCost(args.gpu_hour, args.gpus, args.utilization, args.margin)
    text = self_hosted_book(
        args.model, cost, Throughput(args.prefill_tokens_per_s, args.decode_tokens_per_s, hits), args.currency
    )
    PriceBook.from_toml(text, "from GPU hours")
    print(text, end="")
    return 0


def _decimal(pico: int) -> str:
    whole, part = divmod(pico, 10**PRICE_DECIMALS)
    return f"{whole}.{part:0{PRICE_DECIMALS}d}".rstrip("0").rstrip(".")


def _heading(book: PriceBook) -> str:
    return f"{book.name}  version {book.version}  {book.currency} per million tokens"


def _described(book: PriceBook) -> str:
    lines = [_heading(book)]
    for allowance in book.file.allowance:
        measure = next(n for n in ("tokens", "requests", "money") if getattr(allowance, n) is not None)
        shared = f" for each {', '.join(allowance.per)}" if allowance.per else ", shared by all"
        lines.append(f"free: {allowance.name}, {getattr(allowance, measure)} {measure} a {allowance.period}{shared}")
    return "\n".join((*lines, *(_describe(index, entry) for index, entry in enumerate(book.file.price))))


def _describe(index: int, entry: PriceEntry) -> str:
    lines = [f"price[{index}]  {', '.join(entry.models)}"]
    if entry.effective_from or entry.effective_to:
        lines.append(f"  in force from {entry.effective_from or 'ever'} until {entry.effective_to or 'further notice'}")
    lines += [f"  only teams: {', '.join(entry.teams)}"] if entry.teams else []
    lines += [f"  only regions: {', '.join(entry.regions)}"] if entry.regions else []
    lines += [f"  {name:<12} {rate}" for name, rate in entry.rates.by_class().items()]
    lines += [f"  above {tier.above_prompt_tokens} prompt tokens: other rates" for tier in entry.context]
    for window in entry.windows:
        hours = ", ".join(f"{start}-{end}" for start, end in window.hours)
        lines.append(f"  window {window.name}: {', '.join(window.weekdays)} {hours} {window.timezone}")
    if entry.service_tiers:
        lines.append(f"  service tiers: {', '.join(entry.service_tiers)}")
    return "\n".join(lines)


def _verify_cases(path: Path) -> int:
    results = [run_case(case) for case in load_cases(path)]
    print(render_results(results))
    return 0 if results and all(result.agrees for result in results) else 1
