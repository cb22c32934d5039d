"""Do real clients' requests make the right runs? Each label's runs, steps, tools and parents, from a trace store.

    keepwarm serve --config tests/bench/clients.toml        # a scripted model on port 18080 behind it
    … run clients with BASE_URL=http://127.0.0.1:9310/c/LABEL, each asked to use a tool three times …
    python -m tests.e2e.client_runs ~/.cache/keepwarm-clients/traces.sqlite3

A label must have one run of steps 1, 2, 3 … each of which follows one of its own; ``--twins LABEL`` must have two, and
``--sub-agent LABEL`` one more, which the first one called for by a call that it made itself. Prints each run's steps by
their evidence, with the tools that they ask for; 1 where something is otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tracing.record import RequestRecord
from tracing.store import TraceStore

Runs = dict[str, list[RequestRecord]]


def faults_of(runs: Runs, *, mains: int, called: int) -> list[str]:
    """Return what is wrong with the runs of one client."""
    links = {run_id: [record.link for record in records if record.link] for run_id, records in runs.items()}
    roots = [run_id for run_id, some in links.items() if some[0].parent_run_id is None]
    found = [] if len(roots) == mains else [f"{len(roots)} runs of its own instead of {mains}"]
    if len(runs) - len(roots) != called:
        found.append(f"{len(runs) - len(roots)} runs that were called for instead of {called}")
    for run_id, some in links.items():
        if [link.step for link in some] != list(range(1, len(some) + 1)):
            found.append(f"{run_id}: steps {[link.step for link in some]}")
        known = {record.request_id for record in runs[run_id]}
        if any(link.previous_request_id not in known for link in some[2:]):
            found.append(f"{run_id}: a step follows nothing of its run")
        first = some[0]
        if first.parent_run_id is not None:
            asked = {record.request_id: record for record in runs.get(first.parent_run_id, ())}
            parent = asked.get(first.parent_request_id or "")
            if parent is None or first.parent_call_id not in {call.id for call in parent.tool_calls}:
                found.append(f"{run_id}: its parent did not make the call that it names")
    return found


def main(argv: Sequence[str]) -> int:
    """Print a line for each run of each client; return 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.client_runs")
    parser.add_argument("store", type=Path)
    parser.add_argument("--twins", action="append", default=[], metavar="LABEL")
    parser.add_argument("--sub-agent", action="append", default=[], metavar="LABEL")
    args = parser.parse_args(argv)
    store = TraceStore(args.store, read_only=True)
    labels: dict[str, Runs] = {}
    for record in store.records():
        if record.link is not None:  # what was refused before it was read belongs to no run
            run_id = record.link.run_id
            labels.setdefault(record.labels.get("agent", "-"), {}).setdefault(run_id, []).append(record)
    store.close()
    wrong = 0
    for label, runs in sorted(labels.items()):
        faults = faults_of(runs, mains=2 if label in args.twins else 1, called=int(label in args.sub_agent))
        wrong += bool(faults)
        print(f"{label:32} {'; '.join(faults) or 'ok'}")
        for records in runs.values():
            steps = [f"{r.link.method}{''.join(f' {call.name}' for call in r.tool_calls)}" for r in records if r.link]
            above = records[0].link.parent_run_id if records[0].link else None
            print(f"    {'called for' if above else 'its own'}: {' | '.join(steps)}")
    return int(bool(wrong) or not labels)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
