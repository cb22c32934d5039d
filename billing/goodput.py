"""Goodput: how many requests were answered within the objectives of their keys, from the ledger's rows. Pure.

A request is good when it was answered whole, its first token came within the TTFT objective, and its other tokens came
within the TPOT objective on average. TPOT is (end − first token) / (output tokens − 1); a row knows when a request was
closed and not when its last token came, so it is overstated by what lay between, never understated. Requests for which
nothing was computed and that were refused at the door do not count; what failed, was cut or abandoned counts and is not
good. The same rows give the span of time that the rate is for, unless the caller knows a better one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from billing.reports import check_dimensions, dimension_of, format_money
from billing.row import LedgerRow
from billing.tables import aligned, printable
from tracing.record import Outcome

_NOT_ASKED = frozenset((Outcome.REJECTED.value, Outcome.UPSTREAM_REFUSED.value))


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep; ``None``: whatever it took."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None

    def met(self, row: LedgerRow) -> bool:
        """Tell whether a row kept it."""
        if row.outcome != Outcome.OK.value:
            return False
        if row.first_token_ns is None:
            return True  # not a stream, or no token: there was nothing to wait for in between
        if self.ttft_ns is not None and row.first_token_ns - row.arrived_ns > self.ttft_ns:
            return False
        gaps = row.output_tokens - 1
        return self.tpot_ns is None or gaps < 1 or row.closed_ns - row.first_token_ns <= self.tpot_ns * gaps


@dataclass(slots=True)
class GoodSums:
    """Requests of a group: all, the good ones, and the money of each."""

    requests: int = 0
    good: int = 0
    cost_nano: int = 0
    good_cost_nano: int = 0


@dataclass(slots=True)
class Goodput:
    """Groups by key and currency; ``span_ns`` is the time that rates are for."""

    by: tuple[str, ...]
    span_ns: int = 0
    groups: dict[tuple[tuple[str, ...], str], GoodSums] = field(default_factory=dict)

    def rate(self, sums: GoodSums) -> float:
        """Return good requests a second."""
        return sums.good * 1e9 / self.span_ns if self.span_ns else 0.0


def goodput(
    rows: Iterable[LedgerRow],
    by: Sequence[str],
    objectives: Mapping[str, Objective],
    default: Objective,
    span_ns: int | None = None,
) -> Goodput:
    """Sum rows by dimensions. ``objectives``: of each key id. Raises ``ReportError``; cost: some 5 µs a row."""
    check_dimensions(by)
    dimensions = [dimension_of(name) for name in by]
    result = Goodput(tuple(by))
    first_ns, last_ns = 2**63, 0
    for row in rows:
        if row.revision or row.outcome in _NOT_ASKED:
            continue
        key = (tuple(dimension(row) for dimension in dimensions), row.currency)
        sums = result.groups.setdefault(key, GoodSums())
        good = objectives.get(row.key_id, default).met(row)
        sums.requests += 1
        sums.good += good
        sums.cost_nano += row.amount_nano or 0
        sums.good_cost_nano += (row.amount_nano or 0) if good else 0
        first_ns, last_ns = min(first_ns, row.arrived_ns), max(last_ns, row.closed_ns)
    result.span_ns = max(last_ns - first_ns, 0) if span_ns is None else span_ns
    return result


def render_goodput(found: Goodput) -> str:
    """Return an aligned table, most requests first."""
    lines = [[*found.by, "requests", "good", "share", "good a second", "cost", "cost of good", "currency"]]
    for (key, currency), sums in sorted(found.groups.items(), key=lambda each: (-each[1].requests, each[0])):
        share = f"{100 * sums.good / sums.requests:.1f}%"
        money = (format_money(sums.cost_nano), format_money(sums.good_cost_nano))
        lines.append(
            [
                *map(printable, key),
                f"{sums.requests:,}",
                f"{sums.good:,}",
                share,
                f"{found.rate(sums):.4f}",
                *money,
                currency,
            ]
        )
    return aligned(lines, len(found.by))
