"""What ``keepwarm key``, ``team``, ``tenant`` and ``audit`` have in common: the store, who asks, limits, tables."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections.abc import Callable, Sequence

from gateway import assembly
from gateway.access.errors import AccessError
from gateway.access.records import Actor, LimitKind, Period, StoredLimit, Subject
from gateway.access.shown import Json, shown_limit
from gateway.access.store import AccessStore
from gateway.access.words import money_limit
from gateway.errors import SettingsError
from gateway.limits.rules import Outage
from gateway.settings.arguments import add_settings_arguments, settings_of

_USUAL = {LimitKind.REQUESTS: Period.MINUTE, LimitKind.TOKENS: Period.MINUTE, LimitKind.CONCURRENCY: Period.NONE}


def add_place(parser: argparse.ArgumentParser, *actions: argparse.ArgumentParser) -> None:
    """Declare where the store is, and how answers look."""
    add_settings_arguments(parser, *actions)
    for each in actions or (parser,):
        each.add_argument("--json", action="store_true", help="answer in JSON")


def on_store(args: argparse.Namespace, command: str, work: Callable[[AccessStore, Actor], None]) -> int:
    """Do something with the store; return the exit status: 0, or 1 when it could not be done."""
    try:
        store = assembly.access_store(settings_of(args))
        try:
            work(store, Actor(getpass.getuser(), "cli"))
        finally:
            store.close()
    except (AccessError, SettingsError) as error:
        print(f"keepwarm {command}: {error}", file=sys.stderr)
        return 1
    return 0


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Declare the limits that can be set; ``none`` removes one."""
    parser.add_argument("--requests", metavar="N", help="requests a minute, or 'none'")
    parser.add_argument("--tokens", metavar="N", help="tokens a minute, prompt and output, or 'none'")
    parser.add_argument("--concurrency", metavar="N", help="requests at once, or 'none'")
    parser.add_argument("--money", metavar="AMOUNT/WINDOW", help="as 100/month or 2.50/day; 'none/month' removes it")
    text = "where counts cannot be asked (default: admit; for money deny)"
    parser.add_argument("--on-outage", choices=("admit", "deny"), help=text)


def set_limits(args: argparse.Namespace, store: AccessStore, subject: Subject, actor: Actor) -> None:
    """Set and remove what the arguments say, and show what then holds."""
    outage = None if args.on_outage is None else Outage(args.on_outage)
    for kind, text in (
        (LimitKind.REQUESTS, args.requests),
        (LimitKind.TOKENS, args.tokens),
        (LimitKind.CONCURRENCY, args.concurrency),
    ):
        if text == "none":
            store.remove_limit(subject, kind, _USUAL[kind], actor)
        elif text is not None:
            if not (text.isascii() and text.isdigit()):
                raise SettingsError(f"--{kind.value} {text}: a whole number, or 'none'")
            store.set_limit(StoredLimit(subject, kind, _USUAL[kind], int(text), outage or Outage.ADMIT), actor)
    number, _, window = (args.money or "").partition("/")
    if number == "none":
        if (window or "month") not in set(Period):
            raise SettingsError(f"--money {args.money}: 'none' for a month's, else with a window such as none/day")
        store.remove_limit(subject, LimitKind.MONEY, Period(window or "month"), actor)
    elif args.money is not None:
        nano, period = money_limit(args.money)
        store.set_limit(StoredLimit(subject, LimitKind.MONEY, period, nano, outage or Outage.DENY), actor)
    rows = [shown_limit(limit) for limit in store.limits() if limit.subject == subject]
    show(args, "limits", rows, ("kind", "amount", "period", "on_outage"))


def models_of(words: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the models of repeated or comma-separated arguments; none: all."""
    named = [model for word in words or () for model in word.split(",") if model]
    return tuple(named) if named else None


def show(args: argparse.Namespace, name: str, rows: Sequence[Json], columns: Sequence[str]) -> None:
    """Print rows as a table, or all of them as JSON."""
    if args.json:
        print(json.dumps({name: list(rows)}, indent=2))
        return
    table = [[column.replace("_", " ") for column in columns], *([_cell(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[at]) for line in table) for at in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def show_one(args: argparse.Namespace, name: str, row: Json) -> None:
    """Print one thing, a line for each of its members, or as JSON."""
    if args.json:
        print(json.dumps({name: row}, indent=2))
        return
    for member, value in row.items():
        print(f"{member.replace('_', ' ')}: {_cell(value)}")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{name}={_cell(item)}" for name, item in value.items())
    return "".join(c if c.isprintable() else "\ufffd" for c in str(value))
