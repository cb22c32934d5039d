"""The trace store that a command reads: the one its arguments name, else the settings'."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from billing.errors import ReportError
from gateway import assembly
from gateway.commands.moments import parse_moment
from gateway.settings.arguments import add_to_all, settings_of
from tracing.store import TraceStore
from tracing.store_database import Place, database_at


def add_traces_argument(
    parser: argparse.ArgumentParser, *actions: argparse.ArgumentParser, name: str = "--traces"
) -> None:
    """Declare it: before a command's action or behind it. The parser has ``--config`` and ``--home`` as well."""
    text = "the trace store to read (default: the settings' one)"
    add_to_all(name, parser, actions, dest="traces", metavar="PATH|URL", help=text)


def trace_place(args: argparse.Namespace) -> Place:
    """Return where it is. Raises ``SettingsError``, ``TraceStoreError``."""
    settings = settings_of(args)  # first: what is wrong in them is told whatever else is named
    return assembly.trace_place(settings) if args.traces is None else database_at(args.traces)


def opened_traces(args: argparse.Namespace) -> TraceStore:
    """Open it for reading. Raises ``SettingsError``, ``TraceStoreError``."""
    return TraceStore(trace_place(args), read_only=True)


def add_restart_argument(parser: argparse.ArgumentParser) -> None:
    """Declare it: restarts that the gateway did not see itself."""
    parser.add_argument(
        "--restart", action="append", default=[], metavar="INSTANCE=TIME", help="an engine began anew then; repeatable"
    )


def told_restarts(args: argparse.Namespace, lives: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """Return when engines began anew: as the trace store has it, and as the arguments add. Raises ``ReportError``."""
    found, now_ns = dict(lives), time.time_ns()
    for text in args.restart:
        instance, equals, moment = text.partition("=")
        if not equals:
            raise ReportError(f"--restart {text}: write INSTANCE=TIME")
        found[instance] = (*found.get(instance, ()), parse_moment(moment, now_ns))
    return found
