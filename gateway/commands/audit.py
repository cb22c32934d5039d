"""``keepwarm audit``: every change to keys, teams, tenants and limits: who, when, from where, what. It only grows."""

from __future__ import annotations

import argparse

from gateway.access.command import add_place, on_store, show
from gateway.access.shown import shown_entry
from gateway.commands.arguments import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    text = "the newest so many (default 50)"
    parser.add_argument("--limit", type=whole_number(1), default=50, metavar="N", help=text)
    text = "only entries before this number"
    parser.add_argument("--before", type=whole_number(0, (1 << 63) - 1), metavar="SEQ", help=text)
    parser.add_argument("--subject", help="only of this key, 'tenant/team', or tenant")
    add_place(parser)


def run(args: argparse.Namespace) -> int:
    """Print the entries, newest first."""
    columns = ("seq", "at", "actor", "source", "action", "subject", "detail")

    return on_store(
        args,
        "audit",
        lambda store, _: show(
            args, "entries", [shown_entry(e) for e in store.audit(args.limit, args.before, args.subject)], columns
        ),
    )
