"""``keepwarm key``: make, list, rotate, revoke and limit API keys. A key itself is shown once and kept nowhere."""

from __future__ import annotations

import argparse
import json
import time

from gateway.access.command import add_limits, add_place, models_of, on_store, set_limits, show, show_one
from gateway.access.records import DEFAULT, Actor, NewKey, StoredKey, Subject
from gateway.access.roles import Role
from gateway.access.shown import shown_key
from gateway.access.store import AccessStore
from gateway.access.words import moment_ns, span_s
from gateway.identity import digest_of, new_secret
from gateway.limits.rules import Level
from gateway.repair.policies import POLICIES

_COLUMNS = ("id", "tenant", "team", "roles", "models", "expires_at", "revoked_at", "note")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="make a key in the store; running gateways take it within a second")
    _add_whose(create)
    create.add_argument("--role", action="append", choices=[role.value for role in Role], help="may be repeated")
    create.add_argument("--model", action="append", metavar="NAME", help="may use only these (default: all)")
    create.add_argument("--expires", metavar="WHEN", help="2027-01-31, or a span from now: 90d")
    create.add_argument("--repair", action="append", default=[], choices=list(POLICIES), help="may be repeated")
    create.add_argument("--note", default="", help="what it is for")
    listing = actions.add_parser("list", help="list keys, revoked ones included")
    listing.add_argument("--tenant", help="only this tenant's")
    shown = actions.add_parser("show", help="show one key")
    rotate = actions.add_parser("rotate", help="give a key a new secret; the old one is good for a while")
    rotate.add_argument("--overlap", default="24h", metavar="SPAN", help="for how long: 0, 15m, 24h (default), 7d")
    revoke = actions.add_parser("revoke", help="end a key for good, within a second in every gateway")
    limit = actions.add_parser("limit", help="set what a key may take; without options show it")
    add_limits(limit)
    repair = actions.add_parser("repair", help="set the policies of prefix repair for what a key sends")
    alias = actions.add_parser("alias", help="let a name mean another model for this key")
    for action in (shown, rotate, revoke, limit, repair, alias):
        action.add_argument("id", help="the key's public name")
    repair.add_argument("policy", nargs="*", metavar="POLICY", help=f"of {', '.join(POLICIES)}; none: no repair")
    alias.add_argument("name", help="what the key's clients ask for")
    alias.add_argument("model", nargs="?", help="what they get; without it the alias is removed")
    entry = actions.add_parser("settings", help="make a key for the settings file, and print its entry there")
    _add_whose(entry)
    entry.add_argument("--admin", action="store_true", help="with the role admin")
    add_place(parser, create, listing, shown, rotate, revoke, limit, repair, alias)


def _add_whose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="public name of the key, as bills and logs show it")
    parser.add_argument("--tenant", default=DEFAULT, help="whose cache namespace it uses (default: default)")
    parser.add_argument("--team", default=DEFAULT, help="who is billed (default: default)")


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status."""
    if args.action == "settings":
        return _settings_entry(args)
    return on_store(args, "key", lambda store, actor: _do(args, store, actor))


def _do(args: argparse.Namespace, store: AccessStore, actor: Actor) -> None:
    match args.action:
        case "create":
            roles = tuple(Role(role) for role in args.role or ("user",))
            expires_ns = None if args.expires is None else moment_ns(args.expires, time.time_ns())
            models = models_of(args.model)
            new = NewKey(args.id, args.tenant, args.team, roles, models, note=args.note, expires_ns=expires_ns,
                         repairs=tuple(args.repair))  # fmt: skip
            _show_secret(args, *store.create_key(new, actor))
        case "list":
            show(args, "keys", [shown_key(key) for key in store.keys(args.tenant)], _COLUMNS)
        case "show":
            show_one(args, "key", shown_key(store.key(args.id)))
        case "rotate":
            _show_secret(args, *store.rotate_key(args.id, span_s(args.overlap), actor))
        case "revoke":
            show_one(args, "key", shown_key(store.revoke_key(args.id, actor)))
        case "repair":
            show_one(args, "key", shown_key(store.set_repairs(args.id, args.policy, actor)))
        case "limit":
            set_limits(args, store, Subject(Level.KEY, args.id), actor)
        case _:
            store.set_alias(Subject(Level.KEY, args.id), args.name, args.model, actor)


def _show_secret(args: argparse.Namespace, key: StoredKey, secret: str) -> None:
    if args.json:
        print(json.dumps({"key": shown_key(key), "secret": secret}, indent=2))
    else:
        print(f"the key, shown this once: {secret}")


def _settings_entry(args: argparse.Namespace) -> int:
    secret = new_secret()
    lines = ["[[keys]]", f'id = "{args.id}"', f'sha256 = "{digest_of(secret)}"']
    lines += [f'tenant = "{args.tenant}"', f'team = "{args.team}"', *(["admin = true"] if args.admin else [])]
    print(f"the key, shown this once: {secret}\n\nfor keepwarm.toml:\n")
    print("\n".join(lines))
    return 0
