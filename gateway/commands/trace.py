"""``keepwarm trace``: agent runs in the terminal, from the trace store alone; the gateway may be running or not."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from gateway.console.terminal import run_waterfall, runs_table
from gateway.errors import SettingsError
from gateway.settings import load_settings
from tracing.errors import TracingError
from tracing.record import RequestRecord
from tracing.store import RunFilter, TraceStore
from tracing.store_schema import encode_record

_AGO: Final = re.compile(r"(\d{1,6})([mhd])")
_UNIT_S: Final = {"m": 60, "h": 3600, "d": 86400}
_BROKEN_PIPE: Final = 141  # what a shell reports for a reader that went away


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--store", type=Path, metavar="PATH", help="the trace store (default: the settings' one)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML; default: $KEEPWARM_CONFIG)")
    parser.add_argument("--home", type=Path, metavar="FOLDER", help="folder for all state (default ~/.keepwarm)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="the most recent runs, newest first")
    listing.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default %(default)s)")
    listing.add_argument("--since", type=_ago, metavar="AGO", help="only runs that are younger: 30m, 24h, 7d")
    listing.add_argument("--search", metavar="TEXT", help="part of a run id or an agent's name")
    listing.add_argument("--model", metavar="NAME", help="only runs that used this model")
    listing.add_argument("--failed", action="store_true", help="only runs with a failed request")
    _add_tenant(listing)

    show = actions.add_parser("show", help="one run as a waterfall: time, tokens by tier, cost of every step")
    show.add_argument("run_id", metavar="RUN_ID", help="the run, or 'last'")
    show.add_argument("--colour", choices=("auto", "always", "never"), default="auto", help="(default %(default)s)")
    show.add_argument("--width", type=int, metavar="COLUMNS", help="(default: the terminal's)")
    _add_tenant(show)

    export = actions.add_parser("export", help="records as JSON lines, one a request")
    export.add_argument("run_id", nargs="?", metavar="RUN_ID", help="one run, or 'last' (default: the whole store)")
    export.add_argument("--output", type=Path, metavar="FILE", help="where to (default: standard output)")
    _add_tenant(export)


def run(args: argparse.Namespace) -> int:
    """Do it; 0, or 1 when the store can't be read or holds no such run."""
    try:
        path = _store_path(args)
        if not path.exists():
            print(f"keepwarm trace: there is no trace store at {path}", file=sys.stderr)
            return 1
        store = TraceStore(path, read_only=True)
        try:
            return {"list": _list, "show": _show, "export": _export}[args.action](store, args)
        finally:
            store.close()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at its end
        return _BROKEN_PIPE
    except (TracingError, SettingsError, OSError) as error:
        print(f"keepwarm trace: {error}", file=sys.stderr)
        return 1


def _store_path(args: argparse.Namespace) -> Path:
    if args.store is not None:
        return Path(args.store)
    return load_settings(args.config, {} if args.home is None else {"home": str(args.home.absolute())}).trace_path


def _list(store: TraceStore, args: argparse.Namespace) -> int:
    now_ns = time.time_ns()
    where = RunFilter(
        tenant=args.tenant,
        text=args.search,
        model=args.model,
        since_ns=None if args.since is None else now_ns - args.since,
        failed_only=args.failed,
    )
    summaries = store.runs(max(args.limit, 0), where)
    if not summaries:
        print("no run" + (" matches" if where != RunFilter() else " yet"))
        return 0
    print(runs_table(summaries, now_ns, colour=_colour("auto")))
    return 0


def _show(store: TraceStore, args: argparse.Namespace) -> int:
    records = _records(store, args.run_id, args.tenant)
    if not records:
        return _no_run(args.run_id)
    width = args.width or shutil.get_terminal_size((120, 40)).columns
    print(run_waterfall(records, width=width, colour=_colour(args.colour)))
    return 0


def _export(store: TraceStore, args: argparse.Namespace) -> int:
    records: Iterable[RequestRecord]
    if args.run_id is None:
        records = (each for each in store.records() if args.tenant in (None, each.identity.tenant))
    else:
        records = _records(store, args.run_id, args.tenant)
        if not records:
            return _no_run(args.run_id)
    if args.output is None:
        _write(records, sys.stdout.buffer.write)
        sys.stdout.flush()
        return 0
    with args.output.open("wb") as file:
        _write(records, file.write)
    return 0


def _write(records: Iterable[RequestRecord], write: Callable[[bytes], int]) -> None:
    for record in records:
        write(encode_record(record) + b"\n")


def _records(store: TraceStore, run_id: str, tenant: str | None) -> list[RequestRecord]:
    if run_id != "last":
        return store.run(run_id, tenant)
    summaries = store.runs(1, RunFilter(tenant=tenant))
    return store.run(summaries[0].run_id, summaries[0].tenant) if summaries else []


def _no_run(run_id: str) -> int:
    print(f"keepwarm trace: there is no run {run_id!r}", file=sys.stderr)
    return 1


def _colour(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _add_tenant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")


def _ago(text: str) -> int:
    match = _AGO.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 30m, 24h or 7d")
    return int(match[1]) * _UNIT_S[match[2]] * 10**9
