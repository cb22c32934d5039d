"""``keepwarm key``: make an API key. The settings hold its SHA-256; the key itself is shown once and kept nowhere."""

from __future__ import annotations

import argparse

from gateway.identity import digest_of, new_secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("id", help="public name of the key, as bills and logs show it")
    parser.add_argument("--tenant", default="default", help="whose cache namespace it uses (default: default)")
    parser.add_argument("--team", default="default", help="who is billed (default: default)")
    parser.add_argument("--admin", action="store_true", help="may administer instances and see every tenant's runs")


def run(args: argparse.Namespace) -> int:
    """Print the key and its settings entry."""
    secret = new_secret()
    lines = ["[[keys]]", f'id = "{args.id}"', f'sha256 = "{digest_of(secret)}"']
    lines += [f'tenant = "{args.tenant}"', f'team = "{args.team}"', *(["admin = true"] if args.admin else [])]
    print(f"the key, shown this once: {secret}\n\nfor keepwarm.toml:\n")
    print("\n".join(lines))
    return 0
