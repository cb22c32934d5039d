"""Cost, saving and hit rate over time as one inline SVG: bars for money, a line for the share of hits. Pure.

Colours are classes (``c-cost``, ``c-save``, ``c-rate``) and everything else is ``currentColor``, so that a page decides
them for light and dark. Every bucket says its numbers when pointed at; the table beside the chart has them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from billing.reports import Group, format_money

#: Buckets drawn; of more the last ones are, and the caption says so.
MAX_BUCKETS = 120
_LEFT, _RIGHT, _TOP, _HEIGHT, _WIDTH = 8, 56, 26, 150, 560


def trend_svg(groups: Sequence[Group], currency: str) -> str:
    """Draw groups of one currency, in order of time; nothing where there is nothing to draw."""
    shown = list(groups[-MAX_BUCKETS:])
    highest = max((max(g.sums.amount_nano, g.sums.saved_nano) for g in shown), default=0)
    if highest <= 0:
        return ""
    step = (_WIDTH - _LEFT - _RIGHT) / len(shown)
    bars = "".join(_bucket(group, _LEFT + step * place, step, highest) for place, group in enumerate(shown))
    label = f"Cost, saved and hit rate from {shown[0].key[-1]} to {shown[-1].key[-1]} in {currency}"
    floor = _TOP + _HEIGHT
    marks = f'<line class="c-floor" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>'
    marks += f'<text x="{_LEFT}" y="14">{format_money(highest)} {escape(currency)}</text>'
    marks += f'<text x="{_WIDTH - _RIGHT + 5}" y="{_TOP + 5}">100%</text>'
    marks += f'<text x="{_WIDTH - _RIGHT + 5}" y="{floor}">0%</text>'
    marks += f'<text x="{_LEFT}" y="{floor + 18}">{escape(shown[0].key[-1])}</text>'
    if len(shown) > 1:
        last = escape(shown[-1].key[-1])
        marks += f'<text x="{_WIDTH - _RIGHT}" y="{floor + 18}" text-anchor="end">{last}</text>'
    return (
        f'<svg class="trend" viewBox="0 0 {_WIDTH} {floor + 24}" role="img" aria-label="{escape(label)}">'
        f"{bars}{_rate_line(shown, step)}{marks}</svg>"
    )


def caption(groups: Sequence[Group]) -> str:
    """Return what is drawn, in words."""
    rest = f" The last {MAX_BUCKETS} of {len(groups)}." if len(groups) > MAX_BUCKETS else ""
    return f"Cost (left bar), saved by hits (right bar), hit rate (line).{rest}"


def _bucket(group: Group, x: float, step: float, highest: int) -> str:
    sums = group.sums
    tip = (
        f"{group.key[-1]}: cost {format_money(sums.amount_nano)}, saved {format_money(sums.saved_nano)} "
        f"{group.currency}, hit rate {_percent(group)}"
    )
    width = step * 0.38
    cost, saved = (max(value, 0) * _HEIGHT / highest for value in (sums.amount_nano, sums.saved_nano))
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<rect class="c-hover" x="{x:.1f}" y="{_TOP}" width="{step:.1f}" height="{_HEIGHT}"/>'
        f'<rect class="c-cost" x="{x + step * 0.1:.1f}" y="{_TOP + _HEIGHT - cost:.1f}" width="{width:.1f}" '
        f'height="{cost:.1f}"/>'
        f'<rect class="c-save" x="{x + step * 0.52:.1f}" y="{_TOP + _HEIGHT - saved:.1f}" width="{width:.1f}" '
        f'height="{saved:.1f}"/></g>'
    )


def _percent(group: Group) -> str:
    sums = group.sums
    return f"{100 * sums.hit_tokens / sums.prompt_tokens:.1f}%" if sums.prompt_tokens else "-"


def _rate_line(groups: Sequence[Group], step: float) -> str:
    """A line through the buckets that had prompts."""
    points = [
        f"{_LEFT + step * (place + 0.5):.1f},{_TOP + _HEIGHT * (1 - g.sums.hit_tokens / g.sums.prompt_tokens):.1f}"
        for place, g in enumerate(groups)
        if g.sums.prompt_tokens > 0
    ]
    dots = "".join('<circle class="c-rate" cx="{}" cy="{}" r="2.5"/>'.format(*point.split(",")) for point in points)
    return f'<polyline class="c-rate" points="{" ".join(points)}"/>{dots}'
