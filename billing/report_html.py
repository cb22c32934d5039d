"""A report as one HTML page: bars for cost and saving, the whole table, nothing from elsewhere, no script. Pure."""

from __future__ import annotations

from html import escape

from billing.reports import TIME_HOURS, Group, Report, format_money
from billing.trend_chart import caption, trend_svg

#: Bars drawn for each currency; the table has every group.
MAX_BARS = 60

_STYLE = """
:root { color-scheme: light dark; --cost: #b4541f; --saved: #2f7d5b; --rate: #1f5c94; --line: #8884 }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; white-space: nowrap }
th.key, td.key { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 8rem }
tr.total { font-weight: 600 }
svg { width: 100%; height: auto } svg text { fill: currentColor; font-size: 12px }
.cost, .c-cost { fill: var(--cost) } .saved, .c-save { fill: var(--saved) }
.trend { max-width: 40rem } .c-hover { fill: transparent } .c-floor { stroke: var(--line) }
polyline.c-rate { fill: none; stroke: var(--rate); stroke-width: 1.5 } circle.c-rate { fill: var(--rate) }
figure { margin: 1rem 0; overflow-x: auto } .wide { overflow-x: auto }
@media (prefers-color-scheme: dark) { :root { --cost: #e0875a; --saved: #63b58d; --rate: #8fbbe4 } }
"""
_HEAD = (
    "requests",
    "prompt tokens",
    "hit tokens",
    "hit rate",
    "output tokens",
    "cost",
    "saved",
    "currency",
    "unpriced",
)


def render_html(report: Report, title: str) -> str:
    """Return the page. Names that clients chose are escaped."""
    head = "".join(f'<th scope="col" class="key">{escape(name)}</th>' for name in report.by)
    head += "".join(f'<th scope="col">{name}</th>' for name in _HEAD)
    rows = [_row(group, list(group.key), "") for group in report.groups] if report.by else []
    blank = ["total", *[""] * (len(report.by) - 1)] if report.by else []
    rows += [_row(group, blank, ' class="total"') for group in report.totals]
    charts = "".join(_chart(report, total) for total in report.totals) if report.by else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f'<body><h1>{escape(title)}</h1>\n{charts}<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table></div></body></html>\n"
    )


def _row(group: Group, key: list[str], attributes: str) -> str:
    sums = group.sums
    cells = "".join(f'<td class="key">{escape(value)}</td>' for value in key)
    numbers = (
        f"{sums.requests:,}",
        f"{sums.prompt_tokens:,}",
        f"{sums.hit_tokens:,}",
        f"{100 * sums.hit_tokens / sums.prompt_tokens:.1f}%" if sums.prompt_tokens else "-",
        f"{sums.output_tokens:,}",
        format_money(sums.amount_nano),
        format_money(sums.saved_nano),
        group.currency,
        f"{sums.unpriced:,}",
    )
    return f"<tr{attributes}>{cells}{''.join(f'<td>{number}</td>' for number in numbers)}</tr>\n"


def _chart(report: Report, total: Group) -> str:
    """Draw time as a trend, anything else as two bars a group. A negative saving has no bar; the table says it."""
    groups = [group for group in report.groups if group.currency == total.currency]
    if len(report.by) == 1 and report.by[0] in TIME_HOURS:
        trend = trend_svg(groups, total.currency)
        words = f"{caption(groups)} In {escape(total.currency)}."
        return f"<figure><figcaption>{words}</figcaption>{trend}</figure>\n" if trend else ""
    shown = groups[:MAX_BARS]
    longest = max((max(group.sums.amount_nano, group.sums.saved_nano) for group in shown), default=0)
    if longest <= 0:
        return ""
    bars = []
    for place, group in enumerate(shown):
        y, name = 26 * place, " · ".join(group.key)
        cost, saved = (max(value, 0) * 560 // longest for value in (group.sums.amount_nano, group.sums.saved_nano))
        tip = f"{name}: cost {format_money(group.sums.amount_nano)}, saved {format_money(group.sums.saved_nano)}"
        bars.append(
            f'<g><title>{escape(tip)}</title><text x="230" y="{y + 15}" text-anchor="end">{escape(name[:36])}</text>'
            f'<rect class="cost" x="240" y="{y + 2}" width="{cost}" height="9"/>'
            f'<rect class="saved" x="240" y="{y + 12}" width="{saved}" height="9"/></g>'
        )
    rest = f" The first {MAX_BARS} of {len(groups)} groups." if len(groups) > MAX_BARS else ""
    label = f"Cost (upper bar) and saved (lower bar) in {escape(total.currency)}.{rest}"
    return (
        f'<figure><figcaption>{label}</figcaption><svg viewBox="0 0 820 {26 * len(shown)}" role="img" '
        f'aria-label="{label}">{"".join(bars)}</svg></figure>\n'
    )
