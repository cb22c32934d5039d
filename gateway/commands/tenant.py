"""``keepwarm tenant``: tenants, what they may use and take. Caches, traces and bills are kept apart by tenant."""

from __future__ import annotations

import argparse

from gateway.access.command import add_limits, add_place, models_of, on_store, set_limits, show, show_one
from gateway.access.records import Actor, Subject
from gateway.access.shown import shown_tenant
from gateway.access.store import AccessStore
from gateway.limits.rules import Level


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    put = actions.add_parser("create", help="make a tenant, or change what it may use")
    put.add_argument("--model", action="append", metavar="NAME", help="its keys may use only these (default: all)")
    put.add_argument("--disabled", action="store_true", help="none of its keys is let in")
    listing = actions.add_parser("list", help="list tenants")
    limit = actions.add_parser("limit", help="set what all keys of a tenant may take together; without options show it")
    add_limits(limit)
    alias = actions.add_parser("alias", help="let a name mean another model for this tenant")
    for action in (put, limit, alias):
        action.add_argument("tenant", help="its name")
    alias.add_argument("name", help="what its clients ask for")
    alias.add_argument("model", nargs="?", help="what they get; without it the alias is removed")
    add_place(parser, put, listing, limit, alias)


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status."""
    return on_store(args, "tenant", lambda store, actor: _do(args, store, actor))


def _do(args: argparse.Namespace, store: AccessStore, actor: Actor) -> None:
    match args.action:
        case "create":
            made = store.put_tenant(args.tenant, models_of(args.model), disabled=args.disabled, actor=actor)
            show_one(args, "tenant", shown_tenant(made))
        case "list":
            rows = [shown_tenant(tenant) for tenant in store.tenants()]
            show(args, "tenants", rows, ("name", "models", "disabled", "created_at"))
        case "limit":
            set_limits(args, store, Subject(Level.TENANT, args.tenant), actor)
        case _:
            store.set_alias(Subject(Level.TENANT, args.tenant), args.name, args.model, actor)
