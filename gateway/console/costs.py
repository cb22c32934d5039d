"""The page of costs as plain values: the ledger's sums by one dimension and over time, for whom the visitor may see.

A visitor who belongs to one tenant sees that tenant's rows only: the report is grouped by tenant as well, and what is
of others is left out before anything is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from billing.ledger_read import RowFilter
from billing.posting import CREDIT
from billing.reports import Group, Report, assemble
from billing.trend_chart import caption, trend_svg
from gateway.console.formats import Amount, count, money, share
from gateway.console.scale import Segment, token_bar

#: Windows of the page: their length, and the bucket of their trend.
WINDOWS: Final = {
    "24h": (24 * 3600 * 10**9, "hour", "Last 24 hours"),
    "7d": (7 * 24 * 3600 * 10**9, "day", "Last 7 days"),
    "30d": (30 * 24 * 3600 * 10**9, "day", "Last 30 days"),
    "all": (None, "month", "All time"),
}
DIMENSIONS: Final = ("team", "model", "agent", "key", "instance", "outcome", "run")
MAX_ROWS: Final = 200

ReportOf = Callable[[Sequence[str], RowFilter], Report]
"""The ledger's report; it may be slow and is called in a thread."""


@dataclass(frozen=True, slots=True)
class CostQuery:
    """What the page was asked for. ``tenant``: the only one that may be seen; ``None``: all."""

    by: str = "team"
    window: str = "30d"
    tenant: str | None = None

    @classmethod
    def of(cls, by: str, window: str, tenant: str | None) -> CostQuery:
        """Return a query of what a client wrote; what is not known is the default."""
        return cls(by if by in DIMENSIONS else "team", window if window in WINDOWS else "30d", tenant)

    def since_ns(self, now_ns: int) -> int | None:
        """Return where the window begins."""
        length = WINDOWS[self.window][0]
        return None if length is None else now_ns - length


@dataclass(frozen=True, slots=True)
class CostRow:
    """One group."""

    name: str
    requests: str
    prompt: str
    hits: str
    hit_share: str
    bar: tuple[Segment, ...]
    output: str
    cost: Amount
    saved: Amount
    unpriced: int


@dataclass(frozen=True, slots=True)
class CostTotal:
    """One currency: its sums, what was given back, its trend."""

    currency: str
    requests: str
    hit_share: str
    cost: Amount
    saved: Amount
    given_back: Amount | None
    unpriced: int
    chart: Markup
    caption: str
    rows: tuple[CostRow, ...]
    left_out: int


def cost_report(report_of: ReportOf, query: CostQuery, now_ns: int) -> Report:
    """Return the groups of the page, for its table and its downloads."""
    return _visible(report_of, (query.by,), query, now_ns)


def cost_totals(report_of: ReportOf, query: CostQuery, now_ns: int) -> list[CostTotal]:
    """Return the page, one part for each currency."""
    groups = cost_report(report_of, query, now_ns)
    trend = _visible(report_of, (WINDOWS[query.window][1],), query, now_ns)
    kinds = _visible(report_of, ("endpoint",), query, now_ns)
    return [_total(total, groups, trend, kinds) for total in groups.totals]


def _visible(report_of: ReportOf, by: tuple[str, ...], query: CostQuery, now_ns: int) -> Report:
    where = RowFilter(since_ns=query.since_ns(now_ns))
    if query.tenant is None:
        return report_of(by, where)
    found = report_of(("tenant", *by), where)
    mine = {(g.key[1:], g.currency): g.sums for g in found.groups if g.key[0] == query.tenant}
    return assemble(by, mine)


def _total(total: Group, groups: Report, trend: Report, kinds: Report) -> CostTotal:
    currency, sums = total.currency, total.sums
    rows = [group for group in groups.groups if group.currency == currency]
    points = [group for group in trend.groups if group.currency == currency]
    back = -sum(g.sums.amount_nano for g in kinds.groups if g.key == (CREDIT,) and g.currency == currency)
    return CostTotal(
        currency=currency,
        requests=count(sums.requests),
        hit_share=share(sums.hit_tokens, sums.prompt_tokens),
        cost=money(sums.amount_nano, currency),
        saved=money(sums.saved_nano, currency),
        given_back=money(back, currency) if back else None,
        unpriced=sums.unpriced,
        chart=Markup(trend_svg(points, currency)),  # it escapes what clients named
        caption=caption(points),
        rows=tuple(_row(group) for group in rows[:MAX_ROWS]),
        left_out=max(len(rows) - MAX_ROWS, 0),
    )


def _row(group: Group) -> CostRow:
    sums = group.sums
    tiers = (sums.hit_device_tokens, sums.hit_host_tokens, sums.hit_disk_tokens, sums.hit_pool_tokens)
    counts = tuple(max(each, 0) for each in (*tiers, sums.hit_unknown_tokens, sums.fresh_tokens, sums.write_tokens))
    return CostRow(
        name=group.key[0],
        requests=count(sums.requests),
        prompt=count(sums.prompt_tokens),
        hits=count(sums.hit_tokens),
        hit_share=share(sums.hit_tokens, sums.prompt_tokens),
        bar=token_bar(counts, max(sum(counts), 1)),
        output=count(sums.output_tokens),
        cost=money(sums.amount_nano, group.currency),
        saved=money(sums.saved_nano, group.currency),
        unpriced=sums.unpriced,
    )
