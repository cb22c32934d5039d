"""Runs as text: a tree with what agents tell of themselves, two steps side by side, many runs summed up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from billing.reports import format_money
from billing.tables import aligned, counted, printable
from gateway.console.formats import duration, share
from tracing.analysis import PHASES, Analysis, Sums, percentile
from tracing.detail import Reproduction, StepDetail
from tracing.record import RequestRecord
from tracing.tree import Node, walk


def render_tree(roots: Iterable[Node]) -> str:
    """Return a run as a tree, a line a node."""
    rows = []
    for depth, node in walk(roots):
        bound = "≤ " if node.is_inferred else ""
        what = f"{'  ' * depth}{node.kind} {printable(node.name)}"
        rows.append([what, f"{bound}{duration(node.ended_ns - node.started_ns)}", printable(node.error or ""), node.id])
    return aligned([["what", "time", "error", "id"], *rows], 1) if rows else "nothing\n"


def render_diff(
    one: RequestRecord, other: RequestRecord, details: dict[str, StepDetail | None], common_tokens: int | None
) -> str:
    """Return two steps side by side: their prefix in common, their counts, and what differs of how they were made."""
    lines = [[f"{'':<14}", _title(one), _title(other)]]
    for name, left, right in (
        ("prompt", one.usage.prompt_tokens, other.usage.prompt_tokens),
        ("hit", one.usage.hit_tokens, other.usage.hit_tokens),
        ("output", one.usage.output_tokens, other.usage.output_tokens),
    ):
        lines.append([name, f"{left:,}", f"{right:,}"])
    lines += [
        ["TTFT", duration(one.stamps.ttft_ns), duration(other.stamps.ttft_ns)],
        ["cost", _cost(one), _cost(other)],
        ["instance", one.instance or "–", other.instance or "–"],
    ]
    left_made, right_made = (_made(details.get(record.request_id)) for record in (one, other))
    for field in fields(Reproduction):
        values = [str(getattr(made, field.name)) for made in (left_made, right_made)]
        if values[0] != values[1]:
            lines.append([f"≠ {field.name}", *map(printable, values)])
    text = [aligned(lines, 1).rstrip()]
    known = "not known" if common_tokens is None else f"the first {common_tokens:,} tokens at least"
    text.append(f"in common: {known}")
    for record in (one, other):
        detail = details.get(record.request_id)
        if detail is not None and detail.change is not None:
            change = detail.change
            text.append(
                f"{_title(record)} changed {printable(change.path)} [{change.start}:{change.end}]"
                f" of the step before it: {change.kind.replace('_', ' ')}"
            )
    return "\n".join(text) + "\n"


def render_analysis(found: Analysis, *, most: int) -> str:
    """Return many runs summed up."""
    path = sum(found.critical_ns.values())
    text = [
        f"{counted(found.runs, 'run')}, {counted(found.requests, 'request')}",
        "critical path: "
        + ", ".join(f"{name} {share(found.critical_ns[name], path)}" for name in PHASES if found.critical_ns[name]),
    ]
    for title, sums in (("AGENT", found.agents), ("STEP", found.steps), ("TOOL (at most)", found.tools)):
        if sums:
            text += ["", _table(title, sums[:most]).rstrip()]
    for title, records in (("slowest", found.slowest), ("dearest", found.dearest)):
        rows = [
            [_title(r), duration(r.stamps.closed_ns - r.stamps.arrived_ns), _cost(r), printable(r.instance or "–")]
            for r in records
        ]
        text += ["", aligned([[title, "time", "cost", "instance"], *rows], 1).rstrip()]
    return "\n".join(text) + "\n"


def _table(title: str, sums: Sequence[Sums]) -> str:
    head = [title, "count", "failed", "good", "total", "p50", "p95", "TTFT p50", "TPOT p50", "warm", "cost"]
    rows = []
    for each in sums:
        cost = " + ".join(f"{format_money(nano)} {code}" for code, nano in sorted(each.cost_nano.items())) or "–"
        has_tokens = each.prompt_tokens > 0
        rows.append([
            printable(each.name),
            f"{each.count:,}",
            f"{each.failed:,}",
            share(each.good, each.count) if has_tokens else "–",
            duration(each.total_ns),
            duration(percentile(each.durations_ns, 0.5)),
            duration(percentile(each.durations_ns, 0.95)),
            duration(percentile(each.ttfts_ns, 0.5)),
            duration(percentile(each.tpots_ns, 0.5)),
            share(each.hit_tokens, each.prompt_tokens) if has_tokens else "–",
            cost,
        ])  # fmt: skip
    return aligned([head, *rows], 1)


def _title(record: RequestRecord) -> str:
    link = record.link
    return printable(record.request_id if link is None else f"{link.run_id}:{link.step}")


def _cost(record: RequestRecord) -> str:
    amount = record.charge.amount_nano
    return "unpriced" if amount is None else f"{format_money(amount)} {record.charge.currency}"


def _made(detail: StepDetail | None) -> Reproduction:
    return Reproduction() if detail is None else detail.reproduction
