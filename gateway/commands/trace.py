"""``keepwarm trace``: agent runs in the terminal, from the trace store alone; the gateway may be running or not."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from gateway.commands.arguments import seconds, told, whole_number
from gateway.commands.traces import add_traces_argument, opened_traces
from gateway.console.diffs import common_tokens
from gateway.console.terminal import run_waterfall, runs_table
from gateway.errors import SettingsError
from gateway.recorder import access_line
from gateway.settings.arguments import add_settings_arguments
from gateway.trace_files import chrome_trace, otlp_json, workload
from gateway.trace_text import render_analysis, render_diff, render_tree
from tracing.analysis import Objectives, analysis_json, analyze
from tracing.errors import TracingError
from tracing.record import RequestRecord
from tracing.store import RunFilter, TraceStore
from tracing.store_schema import encode_record
from tracing.tree import run_tree

_AGO: Final = re.compile(r"(\d{1,6})([mhd])")
_UNIT_S: Final = {"m": 60, "h": 3600, "d": 86400}
_LOOK_S: Final = 0.5  # how often a followed store is looked at
_FORMATS: Final = ("jsonl", "otlp", "perfetto", "requests")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="the most recent runs, newest first")
    listing.add_argument(
        "--limit", type=whole_number(1), default=20, metavar="N", help="how many (default %(default)s)"
    )
    listing.add_argument("--since", type=_ago, metavar="AGO", help="only runs that are younger: 30m, 24h, 7d")
    listing.add_argument("--search", metavar="TEXT", help="part of a run id or an agent's name")
    listing.add_argument("--model", metavar="NAME", help="only runs that used this model")
    listing.add_argument("--failed", action="store_true", help="only runs with a failed request")
    _add_tenant(listing)

    show = actions.add_parser("show", help="one run as a waterfall: time, tokens by tier, cost of every step")
    show.add_argument("run_id", metavar="RUN_ID", help="the run, or 'last'")
    show.add_argument("--tree", action="store_true", help="as a tree, with the spans that the agent sent of its own")
    show.add_argument("--colour", choices=("auto", "always", "never"), default="auto", help="(default %(default)s)")
    show.add_argument("--width", type=whole_number(20, 1000), metavar="COLUMNS", help="(default: the terminal's)")
    _add_tenant(show)

    diff = actions.add_parser("diff", help="two steps side by side: what they have in common, and what differs")
    diff.add_argument("one", metavar="STEP", help="a request id, or RUN_ID:STEP")
    diff.add_argument("other", metavar="STEP")
    _add_tenant(diff)

    tail = actions.add_parser("tail", help="a line for each request as it ends, until interrupted")
    tail.add_argument("--count", type=whole_number(1), metavar="N", help="end after so many")
    tail.add_argument("--back", type=whole_number(0, 10_000), default=10, metavar="N", help="begin so many back")
    _add_tenant(tail)

    total = actions.add_parser(
        "analyze", help="many runs: slowest and dearest steps, tools, agents; what runs wait for"
    )
    total.add_argument("--since", type=_ago, default=_ago("24h"), metavar="AGO", help="30m, 24h, 7d (default 24h)")
    total.add_argument("--ttft", type=seconds, metavar="S", help="what counts as good: first token within")
    total.add_argument("--tpot", type=seconds, metavar="S", help="… and each further token within")
    total.add_argument("--limit", type=whole_number(1), default=10, metavar="N", help="(default %(default)s)")
    total.add_argument("--json", action="store_true", help="print JSON")
    _add_tenant(total)

    export = actions.add_parser("export", help="records as JSON lines, OTLP, trace events, or a workload for replay")
    export.add_argument("run_id", nargs="?", metavar="RUN_ID", help="one run, or 'last' (default: the whole store)")
    export.add_argument("--format", choices=_FORMATS, default="jsonl", help="(default %(default)s)")
    export.add_argument("--output", type=Path, metavar="FILE", help="where to (default: standard output)")
    _add_tenant(export)
    add_traces_argument(parser, listing, show, diff, tail, total, export, name="--store")
    add_settings_arguments(parser, listing, show, diff, tail, total, export)


def run(args: argparse.Namespace) -> int:
    """Do it; 0, or 1 when the store can't be read or holds no such run."""
    try:
        store = opened_traces(args)
        try:
            return _ACTIONS[args.action](store, args)
        finally:
            store.close()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise  # no fault of the store's: see ``gateway.cli``
    except (TracingError, SettingsError, OSError) as error:
        print(f"keepwarm trace: {told(error)}", file=sys.stderr)
        return 1


def _list(store: TraceStore, args: argparse.Namespace) -> int:
    now_ns = time.time_ns()
    where = RunFilter(
        tenant=args.tenant,
        text=args.search,
        model=args.model,
        since_ns=None if args.since is None else max(now_ns - args.since, 0),
        failed_only=args.failed,
    )
    summaries = store.runs(args.limit, where)
    if not summaries:
        print("no run" + (" matches" if where != RunFilter() else " yet"))
        return 0
    print(runs_table(summaries, now_ns, colour=_colour("auto")))
    return 0


def _show(store: TraceStore, args: argparse.Namespace) -> int:
    records = _records(store, args.run_id, args.tenant)
    if not records:
        return _no_run(args.run_id)
    if args.tree:
        records += _called(store, records)
        print(render_tree(run_tree(records, store.spans_of(records))), end="")
        return 0
    width = args.width or shutil.get_terminal_size((120, 40)).columns
    print(run_waterfall(records, width=width, colour=_colour(args.colour)))
    return 0


def _called(store: TraceStore, records: list[RequestRecord]) -> list[RequestRecord]:
    """Return the steps of the runs that a run called for, and of those that these did."""
    tenant, link = records[0].identity.tenant, records[0].link
    known = {link.run_id} if link is not None else set()
    until_ns = max(record.stamps.closed_ns for record in records)
    found: list[RequestRecord] = []
    for call in store.called_runs(tenant, records[0].stamps.arrived_ns, until_ns):
        if call.parent_run_id in known and call.run_id not in known:
            known.add(call.run_id)
            found += store.run(call.run_id, tenant)
    return found


def _diff(store: TraceStore, args: argparse.Namespace) -> int:
    found = [_step(store, text, args.tenant) for text in (args.one, args.other)]
    for text, record in zip((args.one, args.other), found, strict=True):
        if record is None:
            print(f"keepwarm trace: there is no step {text!r}", file=sys.stderr)
            return 1
    one, other = (record for record in found if record is not None)
    details = store.details([one.request_id, other.request_id])
    print(render_diff(one, other, dict(details), common_tokens(one.prefix, other.prefix)), end="")
    return 0


def _step(store: TraceStore, text: str, tenant: str | None) -> RequestRecord | None:
    run_id, colon, step = text.rpartition(":")
    if colon and step.isdigit():
        steps = _records(store, run_id, tenant)
        return next((r for r in steps if r.link is not None and r.link.step == int(step)), None)
    record = store.record(text)
    return record if record is not None and tenant in (None, record.identity.tenant) else None


def _tail(store: TraceStore, args: argparse.Namespace) -> int:
    shown, seen = 0, set[str]()
    records = store.recent(args.back)
    while True:
        for record in records:
            if record.request_id not in seen and args.tenant in (None, record.identity.tenant):
                print(access_line(record), flush=True)
                shown += 1
                if shown == args.count:
                    return 0
        seen = {record.request_id for record in records}
        time.sleep(_LOOK_S)
        records = store.recent(max(1000, len(seen)))
        if not seen and not args.back:
            seen = {record.request_id for record in records}


def _analyze(store: TraceStore, args: argparse.Namespace) -> int:
    since_ns = max(time.time_ns() - args.since, 0)
    records = [r for r in store.arrived(since_ns) if args.tenant in (None, r.identity.tenant)]
    limits = (None if seconds is None else int(seconds * 1e9) for seconds in (args.ttft, args.tpot))
    found = analyze(records, Objectives(*limits), most=args.limit)
    if args.json:
        print(json.dumps(analysis_json(found), indent=2, ensure_ascii=False))
    else:
        print(render_analysis(found, most=args.limit), end="")
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
        _write(store, records, args.format, sys.stdout.buffer.write)
        sys.stdout.flush()
        return 0
    with args.output.open("wb") as file:
        _write(store, records, args.format, file.write)
    return 0


def _write(store: TraceStore, records: Iterable[RequestRecord], form: str, write: Callable[[bytes], int]) -> None:
    if form == "jsonl":
        for record in records:
            write(encode_record(record) + b"\n")
        return
    if form == "requests":
        for line in workload(records, "keepwarm"):
            write(line)
        return
    held = list(records)
    runs: dict[tuple[str, str | None], list[RequestRecord]] = {}
    for record in held:
        runs.setdefault((record.identity.tenant, record.link.run_id if record.link else None), []).append(record)
    received = [span for run in runs.values() for span in store.spans_of(run)]
    write(otlp_json(held, received) if form == "otlp" else chrome_trace(held, received))


_ACTIONS: Final[dict[str, Callable[[TraceStore, argparse.Namespace], int]]] = {
    "list": _list,
    "show": _show,
    "diff": _diff,
    "tail": _tail,
    "analyze": _analyze,
    "export": _export,
}


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
