"""``keepwarm team``: the teams of a tenant, what they may use and take."""

from __future__ import annotations

import argparse

from gateway.access.command import add_limits, add_place, models_of, on_store, set_limits, show, show_one
from gateway.access.records import Actor, Subject
from gateway.access.shown import shown_team
from gateway.access.store import AccessStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    put = actions.add_parser("create", help="make a team, or change what it may use")
    put.add_argument("--model", action="append", metavar="NAME", help="its keys may use only these (default: all)")
    put.add_argument("--disabled", action="store_true", help="none of its keys is let in")
    listing = actions.add_parser("list", help="list teams")
    listing.add_argument("--tenant", help="only this tenant's")
    limit = actions.add_parser("limit", help="set what all keys of a team may take together; without options show it")
    add_limits(limit)
    alias = actions.add_parser("alias", help="let a name mean another model for this team")
    for action in (put, limit, alias):
        action.add_argument("tenant", help="whose team")
        action.add_argument("team", help="its name")
    alias.add_argument("name", help="what its clients ask for")
    alias.add_argument("model", nargs="?", help="what they get; without it the alias is removed")
    add_place(parser, put, listing, limit, alias)


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status."""
    return on_store(args, "team", lambda store, actor: _do(args, store, actor))


def _do(args: argparse.Namespace, store: AccessStore, actor: Actor) -> None:
    match args.action:
        case "create":
            models = models_of(args.model)
            made = store.put_team(args.tenant, args.team, models, disabled=args.disabled, actor=actor)
            show_one(args, "team", shown_team(made))
        case "list":
            rows = [shown_team(team) for team in store.teams(args.tenant)]
            show(args, "teams", rows, ("tenant", "name", "models", "disabled", "created_at"))
        case "limit":
            set_limits(args, store, Subject.team(args.tenant, args.team), actor)
        case _:
            store.set_alias(Subject.team(args.tenant, args.team), args.name, args.model, actor)
