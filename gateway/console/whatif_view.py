"""What-if as plain values: what happened and each scenario as a bar to one scale."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.console.formats import NOTHING, Amount, count, duration, money, share
from gateway.console.scale import percent
from gateway.whatif.compare import Comparison
from gateway.whatif.report import Line, lines


@dataclass(frozen=True, slots=True)
class ScenarioRow:
    """What happened, or a scenario, in one currency."""

    name: str
    title: str
    is_recorded: bool
    hit_share: str
    hit_width: str
    hits: str
    more_hits: str
    cost: Amount
    cost_width: str
    more_cost: Amount
    is_cheaper: bool
    is_dearer: bool
    unpriced: int
    ttft: str


@dataclass(frozen=True, slots=True)
class WhatIfView:
    """The answer: rows by currency, and what was left out."""

    currencies: tuple[tuple[str, tuple[ScenarioRow, ...]], ...]
    requests: str
    stride: str
    left_out: tuple[tuple[str, str], ...]


def whatif_view(comparison: Comparison) -> WhatIfView:
    """Return what the page shows."""
    by_currency: dict[str, list[Line]] = {}
    for line in lines(comparison):
        by_currency.setdefault(line.currency, []).append(line)
    requests = sum(sums.requests for sums in comparison.recorded.sums.values())
    return WhatIfView(
        currencies=tuple((currency, _rows(some)) for currency, some in by_currency.items()),
        requests=count(requests),
        stride=count(comparison.stride_tokens),
        left_out=tuple((count(number), reason) for reason, number in sorted(comparison.left_out.items())),
    )


def _rows(some: list[Line]) -> tuple[ScenarioRow, ...]:
    dearest = max(line.cost_nano for line in some) or 1
    return tuple(_row(line, dearest) for line in some)


def _row(line: Line, dearest: int) -> ScenarioRow:
    return ScenarioRow(
        name=line.name,
        title=line.title,
        is_recorded=line.name == "recorded",
        hit_share=share(line.hit_tokens, line.prompt_tokens),
        hit_width=percent(line.hit_tokens, line.prompt_tokens),
        hits=count(line.hit_tokens),
        more_hits=f"{line.more_hit_tokens:+,}".replace("-", "−") if line.more_hit_tokens else NOTHING,
        cost=money(line.cost_nano, line.currency),
        cost_width=percent(max(line.cost_nano, 0), dearest),
        more_cost=money(line.more_cost_nano, line.currency),
        is_cheaper=line.more_cost_nano < 0,
        is_dearer=line.more_cost_nano > 0,
        unpriced=line.unpriced,
        ttft=duration(line.ttft_ns),
    )
