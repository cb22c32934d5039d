"""Unit cost: what one run of an agent costs, as a distribution over runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from billing.reports import Report, format_money
from billing.tables import aligned, printable


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The runs of one agent in one currency. Money is nano-units; quantiles are those of runs, not interpolated."""

    agent: str
    currency: str
    runs: int
    requests: int
    cost_nano: int
    saved_nano: int
    p50_nano: int
    p90_nano: int
    most_nano: int
    prompt_tokens: int
    hit_tokens: int


def unit_costs(report: Report) -> list[UnitCost]:
    """Return the unit costs of a report by (agent, run); requests outside runs are left out. Costliest first."""
    assert report.by == ("agent", "run")
    groups: dict[tuple[str, str], list[int]] = {}
    for place, group in enumerate(report.groups):
        if group.key[1] != "-":
            groups.setdefault((group.key[0], group.currency), []).append(place)
    found = []
    for (agent, currency), places in groups.items():
        sums = [report.groups[place].sums for place in places]
        costs = sorted(each.amount_nano for each in sums)
        found.append(
            UnitCost(
                agent=agent,
                currency=currency,
                runs=len(costs),
                requests=sum(each.requests for each in sums),
                cost_nano=sum(costs),
                saved_nano=sum(each.saved_nano for each in sums),
                p50_nano=costs[(len(costs) - 1) // 2],
                p90_nano=costs[(len(costs) * 9 + 9) // 10 - 1],
                most_nano=costs[-1],
                prompt_tokens=sum(each.prompt_tokens for each in sums),
                hit_tokens=sum(each.hit_tokens for each in sums),
            )
        )
    return sorted(found, key=lambda each: (-each.cost_nano, each.agent))


def render_unit_costs(costs: list[UnitCost]) -> str:
    """Return an aligned table."""
    lines = [["agent", "runs", "steps a run", "hit", "a run", "p50", "p90", "most", "saved a run", "cost", "currency"]]
    for each in costs:
        hit = f"{100 * each.hit_tokens / each.prompt_tokens:.1f}%" if each.prompt_tokens else "-"
        a_run, saved = (value // each.runs for value in (each.cost_nano, each.saved_nano))
        money = (a_run, each.p50_nano, each.p90_nano, each.most_nano, saved, each.cost_nano)
        steps = f"{each.requests / each.runs:.1f}"
        lines.append([printable(each.agent), f"{each.runs:,}", steps, hit, *map(format_money, money), each.currency])
    return aligned(lines, 1)
