"""A replay as one SVG picture: TTFT percentiles, hits by tier against the bound, and work by instance.

Written by hand, so that it needs no plotting library and no script. Colours work on white and on dark paper; every
mark has a title that says its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from gateway.replay.measures import Summary

WIDTH, HEIGHT = 1120, 460
_COLOURS = ("#2a6fbb", "#d9822b", "#3a9b57", "#b04a8f", "#7a6cc4", "#8a8a8a")
_TIER_COLOURS = {"device": "#1f3a5f", "host": "#4f9d9d", "disk": "#c9a227", "pool": "#8c564b"}
_LABELLED_LIMIT = 4  # more policies than this are told apart by their bars' titles only
_TOP, _BOTTOM, _PANEL = 70, 360, 290
_LEFTS = (70, 450, 820)


def render_picture(title: str, summaries: Sequence[Summary]) -> str:
    """Return the picture as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(20, 28, title, size=15),
        *_ttft(summaries, _LEFTS[0]),
        *_hits(summaries, _LEFTS[1]),
        *_balance(summaries, _LEFTS[2]),
        *_legend(summaries),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _ttft(summaries: Sequence[Summary], left: float) -> Iterator[str]:
    """Curves: share of requests (across) against TTFT on a logarithmic scale (up)."""
    values = [max(value, 1e-3) for summary in summaries for value in summary.ttft_curve_s]
    low, high = floor(log10(min(values))), max(ceil(log10(max(values))), floor(log10(min(values))) + 1)

    def up(seconds: float) -> float:
        return _BOTTOM - (log10(max(seconds, 1e-3)) - low) / (high - low) * (_BOTTOM - _TOP)

    yield _text(left, _TOP - 15, "TTFT by percentile of requests (s, logarithmic)")
    for power in range(low, high + 1):
        yield _line(left, up(10**power), left + _PANEL, up(10**power))
        yield _text(left - 8, up(10**power) + 4, f"{10.0**power:g}", anchor="end")
    for percent in (0, 50, 90):
        yield _text(left + _PANEL * percent / 100, _BOTTOM + 18, f"p{percent}", anchor="middle")
    for summary, colour in zip(summaries, _cycle(), strict=False):
        curve = summary.ttft_curve_s
        points = " ".join(
            f"{left + _PANEL * place / (len(curve) - 1):.1f},{up(value):.1f}" for place, value in enumerate(curve)
        )
        spread = summary.ttft_s
        yield (
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"><title>'
            f"{escape(summary.policy)}: p50 {spread.p50:.3f} s, p90 {spread.p90:.3f} s, p99 {spread.p99:.3f} s"
            "</title></polyline>"
        )


def _hits(summaries: Sequence[Summary], left: float) -> Iterator[str]:
    """Stacked bars of prompt tokens by the tier that had them; a mark where an infinite cache would be."""
    yield _text(left, _TOP - 15, "Prompt tokens hit, by tier (%); line: infinite cache")
    yield from _percent_axis(left)
    step = _PANEL / len(summaries)
    for place, summary in enumerate(summaries):
        x, width, base = left + step * (place + 0.15), step * 0.7, 0.0
        for tier, colour in _TIER_COLOURS.items():
            share = summary.tier_hit_shares[tier]
            yield _bar(x, width, base, base + share, colour, f"{summary.policy}, {tier}: {100 * share:.1f} %")
            base += share
        if len(summaries) <= _LABELLED_LIMIT:
            yield _text(x + width / 2, _BOTTOM + 18, summary.policy, size=10, anchor="middle")
        bound = _up_share(summary.bound_hit_share)
        yield (
            f'<line x1="{x - 4:.1f}" y1="{bound:.1f}" x2="{x + width + 4:.1f}" y2="{bound:.1f}" stroke="#333" '
            f'stroke-width="2"><title>infinite cache: {100 * summary.bound_hit_share:.1f} %</title></line>'
        )


def _balance(summaries: Sequence[Summary], left: float) -> Iterator[str]:
    """Bars of prefill work by instance, scaled to the largest; a group for each policy."""
    yield _text(left, _TOP - 15, "Prefill work by instance (% of the largest)")
    yield from _percent_axis(left, _PANEL - 30)
    step = (_PANEL - 30) / len(summaries)
    for place, (summary, colour) in enumerate(zip(summaries, _cycle(), strict=False)):
        work = summary.prefill_s_by_instance
        largest, width = max(*work, 1e-9), step * 0.8 / len(work)
        for number, seconds in enumerate(work):
            x = left + step * (place + 0.1) + width * number
            label = f"{summary.policy}, instance {number}: {seconds:.1f} s"
            yield _bar(x, width * 0.85, 0.0, seconds / largest, colour, label)


def _percent_axis(left: float, width: float = _PANEL) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        y = _up_share(percent / 100)
        yield _line(left, y, left + width, y)
        yield _text(left - 8, y + 4, str(percent), anchor="end")


def _legend(summaries: Sequence[Summary]) -> Iterator[str]:
    for place, (summary, colour) in enumerate(zip(summaries, _cycle(), strict=False)):
        x, y = 70 + (place % 4) * 265, _BOTTOM + 45 + 20 * (place // 4)
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 18, y, f"{summary.policy} ({100 * summary.of_bound:.0f}% of bound)")
    for place, (tier, colour) in enumerate(_TIER_COLOURS.items()):
        yield f'<rect x="{70 + place * 100}" y="{HEIGHT - 24}" width="12" height="12" fill="{colour}"/>'
        yield _text(88 + place * 100, HEIGHT - 14, tier)


def _cycle() -> Iterator[str]:
    while True:
        yield from _COLOURS


def _up_share(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _bar(x: float, width: float, low: float, high: float, colour: str, title: str) -> str:
    top = _up_share(high)
    return (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_up_share(low) - top:.1f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ccc"/>'


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'
