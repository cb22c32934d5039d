"""A comparison as rows: for the terminal, for JSON and CSV, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from billing.reports import format_money
from billing.tables import aligned, counted
from gateway.whatif.compare import Comparison, Played


@dataclass(frozen=True, slots=True)
class Line:
    """What happened or a scenario, in one currency. ``more``: against what happened; of a simulated fleet against the
    fleet as it was, simulated. Money is nano-units, ``ttft_ns`` a mean (an estimate, but for what happened)."""

    name: str
    title: str
    currency: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    more_hit_tokens: int
    cost_nano: int
    more_cost_nano: int
    unpriced: int
    ttft_ns: int | None


def lines(comparison: Comparison) -> list[Line]:
    """Return what happened first, then each scenario, by currency."""
    found = [_line(comparison.recorded, currency, comparison.recorded) for currency in comparison.recorded.sums]
    by_name = {played.name: played for played in (comparison.recorded, *comparison.scenarios)}
    for played in comparison.scenarios:
        found += [_line(played, currency, by_name[played.beside]) for currency in played.sums]
    return found


def _line(played: Played, currency: str, beside: Played) -> Line:
    sums, other = played.sums[currency], beside.sums.get(currency)
    return Line(
        name=played.name,
        title=played.title,
        currency=currency,
        requests=sums.requests,
        prompt_tokens=sums.prompt_tokens,
        hit_tokens=sums.hit_tokens,
        more_hit_tokens=sums.hit_tokens - (other.hit_tokens if other is not None else 0),
        cost_nano=sums.cost_nano,
        more_cost_nano=sums.cost_nano - (other.cost_nano if other is not None else 0),
        unpriced=sums.unpriced,
        ttft_ns=sums.ttft_ns // sums.with_ttft if sums.with_ttft else None,
    )


def content(comparison: Comparison) -> dict[str, object]:
    """Return everything as values that JSON holds."""
    return {
        "first_ns": comparison.first_ns,
        "last_ns": comparison.last_ns,
        "stride_tokens": comparison.stride_tokens,
        "left_out": comparison.left_out,
        "lines": [asdict(line) for line in lines(comparison)],
    }


def render(comparison: Comparison) -> str:
    """Return a table for the terminal."""
    rows: list[Sequence[str]] = [("", "hit", "hit tokens", "more", "cost", "more", "mean TTFT", "currency")]
    rows += [
        (
            line.title,
            f"{100 * line.hit_tokens / line.prompt_tokens:.1f}%" if line.prompt_tokens else "-",
            f"{line.hit_tokens:,}",
            f"{line.more_hit_tokens:+,}" if line.name != "recorded" else "",
            format_money(line.cost_nano) + (f" (+{line.unpriced} unpriced)" if line.unpriced else ""),
            signed_money(line.more_cost_nano) if line.name != "recorded" else "",
            "-" if line.ttft_ns is None else f"{line.ttft_ns / 1e6:,.1f} ms",
            line.currency,
        )
        for line in lines(comparison)
    ]
    notes = [f"prompts are known to {comparison.stride_tokens} tokens; TTFT of scenarios is an estimate"]
    notes += [
        f"left out: {counted(count, 'request')}, {reason}" for reason, count in sorted(comparison.left_out.items())
    ]
    return aligned([list(row) for row in rows], 1).rstrip() + "\n" + "\n".join(notes) + "\n"


def signed_money(nano: int) -> str:
    """Return a difference with its sign."""
    return ("+" if nano > 0 else "") + format_money(nano)
