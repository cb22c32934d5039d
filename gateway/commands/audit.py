"""``keepwarm audit``: every change to keys, teams, tenants and limits: who, when, from where, what. It only grows."""

from __future__ import annotations

import argparse

from gateway.access.command import add_place, on_store, show
from gateway.access.shown import shown_entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="the newest so many (default 50)")
    parser.add_argument("--before", type=int, metavar="SEQ", help="only entries before this number")
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
