"""The command ``keepwarm``: one sub-command a module of ``gateway.commands``, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

COMMANDS = {
    "serve": "run the gateway (with no settings at all: with an embedded engine)",
    "check": "validate the settings and try every connection they name",
    "demo": "run a real agent through a gateway with two embedded engines and show what happened",
    "report": "show what was spent and saved, from the ledger",
    "reconcile": "compare the ledger with engines and invoices",
    "attribution": "show who computed what others read, what was lost, wasted and saved, from traces",
    "credits": "post free allowances and what is given back for lost hits",
    "ledger": "verify the ledger, close periods, post corrections",
    "doctor": "show which hits agents lost, why, what that cost and what would mend it",
    "trace": "list, show and export agent runs, from the trace store",
    "prices": "check and show price books",
    "store": "look at, verify and clear page tiers on disk and in a pool",
    "whatif": "show what recorded requests would have hit and cost under other caches, policies, prompts or prices",
    "replay": "show what a fleet would do with a recorded request trace",
    "key": "make, rotate, revoke and limit API keys",
    "team": "make teams, and say what they may use and take",
    "tenant": "make tenants, and say what they may use and take",
    "audit": "show every change to keys, teams, tenants and limits",
}

_BROKEN_PIPE = 141  # what a shell reports for a reader that went away
_EPILOG = """\
keepwarm stands between agents and inference engines. Agents use http://HOST:PORT/v1 as their OpenAI
base URL; keepwarm sends each request where its prefix is warm, and bills and traces it.

  keepwarm serve                          one embedded engine on this machine, http://127.0.0.1:8400
  keepwarm serve --config keepwarm.toml   in front of the engines that the file names
  keepwarm check --config keepwarm.toml   is the file right, and is everybody there?

Exit status: 0 when it was done, 1 when it could not be or something is wrong with what it looked at,
2 when the command line was not understood.

Settings come from the file, from the environment (KEEPWARM_SERVER__PORT=8400) and from flags; later ones win.
State lies in the folder 'home' of the settings: $KEEPWARM_HOME, by default ~/.keepwarm.
"""


class Command(Protocol):
    """A module of ``gateway.commands``."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status (2: it was not understood)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="keepwarm", description="A caching gateway for agents.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"keepwarm {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen: Command | None = None
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == asked:
            chosen = cast(Command, importlib.import_module(f"gateway.commands.{name}"))
            chosen.add_arguments(sub)
    args = parser.parse_args(words)
    assert chosen is not None  # argparse has refused every other word
    try:
        status = chosen.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has enough: ``| head``
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at its end
        return _BROKEN_PIPE
    return status


def _version() -> str:
    try:
        return version("keepwarm")
    except PackageNotFoundError:
        return "(not installed)"
