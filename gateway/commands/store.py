"""``keepwarm store``: what page tiers on disk and in a pool hold, whether it is whole, and how to be rid of it.

Without ``--disk`` and ``--pool`` it is the disk tiers of the home's embedded engines. Of a disk tier that an engine has
open, ``stat`` shows what the engine tells of it, and the others refuse. Encrypted pages are looked into with the keys
that the environment names (``kvstore.at_rest``).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from billing.tables import counted
from gateway.commands.arguments import real_number
from gateway.errors import SettingsError
from gateway.settings.arguments import add_settings_arguments, settings_of
from kvstore.at_rest import at_rest_from_environment
from kvstore.errors import StoreError
from kvstore.inspection import Contents, clear_disk, clear_pool, disk_contents, pool_contents
from kvstore.shared_host import serve_until_told
from kvstore.tiers.pool_url import without_secret
from kvstore.tiers.slab import SLAB_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    stat = actions.add_parser("stat", help="count pages and bytes, by layout and namespace")
    verify = actions.add_parser("verify", help="read every page and check it; exit 1 if any is bad or its key not here")
    clear = actions.add_parser("clear", help="remove every page")
    serve = actions.add_parser("serve-host", help="share one host tier between the engine processes of this machine")
    serve.add_argument("--socket", type=Path, required=True, metavar="FILE", help="where engines find it")
    serve.add_argument(
        "--gb",
        type=real_number(0, 1e6, above=True),
        required=True,
        metavar="N",
        help="memory for pages, of all layouts together",
    )
    clear.add_argument(
        "--layout", type=_fingerprint, metavar="HEX", help="of the pools, only the pages of this layout's fingerprint"
    )
    for action in (stat, verify, clear):
        action.add_argument("--disk", type=Path, action="append", default=[], metavar="FOLDER", help="a disk tier")
        action.add_argument("--pool", action="append", default=[], metavar="URL", help="a Redis or Valkey pool")
    for action in (stat, verify):
        action.add_argument("--json", action="store_true", help="print JSON")
    add_settings_arguments(parser, stat, verify, clear)


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status: 0, or 1 when something is bad, in use or not there."""
    if args.action == "serve-host":
        return _serve_host(args.socket, int(args.gb * 1e9))
    try:
        folders = args.disk if args.disk or args.pool else _home_folders(args)
    except SettingsError as error:
        print(f"keepwarm store: {error}", file=sys.stderr)
        return 1
    if not folders and not args.pool:
        print("keepwarm store: no disk tier there; name one with --disk, or a pool with --pool", file=sys.stderr)
        return 1
    good, shown = True, []
    for place in (*folders, *args.pool):
        try:
            contents = _look(args, place)
        except StoreError as error:
            print(f"keepwarm store: {error}", file=sys.stderr)
            good = False
            continue
        if contents is not None:
            good = good and not (args.action == "verify" and (contents.bad or contents.hidden))
            shown.append(contents)
            if not args.json:
                print(_text(contents, verified=args.action == "verify"))
    if args.action != "clear" and args.json:
        print(json.dumps([_json(contents) for contents in shown], indent=2))
    return 0 if good else 1


def _fingerprint(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no fingerprint of a layout, which `stat` tells: 32 digits of 0 to f"
        )
    return text


def _serve_host(path: Path, capacity_bytes: int) -> int:
    """Serve until a signal says that it is over."""
    try:
        serve_until_told(path, capacity_bytes)
    except StoreError as error:
        print(f"keepwarm store: {error}", file=sys.stderr)
        return 1
    return 0


def _home_folders(args: argparse.Namespace) -> list[Path]:
    home = settings_of(args).home
    return sorted(slab.parent for slab in home.glob(f"instances/*/disk/{SLAB_NAME}"))


def _look(args: argparse.Namespace, place: Path | str) -> Contents | None:
    """Look at one place, or clear it and say so. Raises ``StoreError``."""
    if args.action != "clear":
        verify, keys = args.action == "verify", at_rest_from_environment().keys
        if isinstance(place, Path):
            return disk_contents(place, verify=verify, keys=keys)
        return pool_contents(place, verify=verify, keys=keys)
    if isinstance(place, Path):
        clear_disk(place)
        print(f"{place}: cleared")
    else:
        print(f"{without_secret(place)}: {counted(clear_pool(place, fingerprint=args.layout), 'page')} removed")
    return None


def _text(contents: Contents, *, verified: bool) -> str:
    lines = [f"{_name(contents)}: {counted(contents.pages, 'page')}, {contents.page_bytes / 1e6:,.1f} MB"]
    if contents.in_use is not None:
        status = contents.in_use
        lines[0] += f" of {status.capacity_bytes / 1e6:,.1f} MB"
        lines[0] += f", in use by process {status.pid}, which said so {status.age_s:.0f} s ago"
    if verified and contents.pages:
        lines[0] += ", each read and right"
    lines += [f"  layout {layout}: {counted(pages, 'page')}" for layout, pages in contents.layouts.most_common()]
    for namespace, pages in contents.namespaces.most_common():
        lines.append(f"  salt {namespace.salt or '-'}, adapter {namespace.adapter or '-'}: {counted(pages, 'page')}")
    for key_id, pages in contents.hidden.most_common():
        lines.append(f"  under key {key_id}, which is not here: {counted(pages, 'page')}, not looked into")
    lines += [f"  BAD ({reason}): {pages}, never served" for reason, pages in contents.bad.most_common()]
    return "\n".join(lines)


def _json(contents: Contents) -> dict[str, object]:
    status = contents.in_use
    return {
        "where": _name(contents),
        "pages": contents.pages,
        "page_bytes": contents.page_bytes,
        "layouts": contents.layouts,
        "namespaces": [{**namespace._asdict(), "pages": pages} for namespace, pages in contents.namespaces.items()],
        "bad": contents.bad,
        "hidden": contents.hidden,
        "in_use": None
        if status is None
        else {"pid": status.pid, "told_at_s": status.told_at_s, "capacity_bytes": status.capacity_bytes},
    }


def _name(contents: Contents) -> str:
    return without_secret(contents.where) if "://" in contents.where else contents.where
