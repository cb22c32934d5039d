"""Runs as text for a terminal: a list, and one run as a waterfall. Pure; colour is a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from billing.tables import printable
from gateway.console.formats import ago, count, duration, of, share
from gateway.console.run_views import RunView, page_of, pages_of, run_view
from gateway.console.scale import Segment
from gateway.console.step_views import StepView
from gateway.console.views import money_views
from tracing.record import RequestRecord
from tracing.store import RunSummary

MIN_WIDTH: Final = 94
_RESET: Final = "\x1b[0m"
# what each kind of segment is drawn with, and its colour (256-colour palette)
_INK: Final = {
    "device": ("█", 166), "host": ("▓", 208), "disk": ("▒", 179), "pool": ("▚", 132), "unknown": ("▓", 173),
    "fresh": ("░", 68), "written": ("░", 110), "output": ("▌", 246),
    "route": ("·", 240), "send": ("·", 240), "queue": ("░", 240), "fetch": ("▚", 179),
    "prefill": ("▒", 245), "decode": ("█", 250), "close": ("·", 240),
    "tool": ("━", 107), "told": ("━", 71), "wait": ("┄", 240),
}  # fmt: skip
_SLIGHT: Final = frozenset({"route", "send", "close"})  # left out where they are less than half a cell
_MUTED: Final = 245
_BAD: Final = 203
_GOOD: Final = 108


def runs_table(summaries: Sequence[RunSummary], now_ns: int, *, colour: bool = False) -> str:
    """The runs list as aligned columns."""
    rows = [("RUN", "AGENT", "MODEL", "STEPS", "PROMPT", "WARM", "TTFT P50", "COST", "SAVED", "LAST STEP")]
    for each in summaries:
        sums = money_views(each.money)
        rows.append((
            printable(each.run_id),
            printable(each.agent or "–"),
            printable(each.model),
            count(each.steps) + (f" ({each.failed} failed)" if each.failed else ""),
            count(each.prompt_tokens),
            share(sum(each.hit_tokens), each.prompt_tokens),
            duration(each.ttft_p50_ns),
            " ".join(str(money.cost) + (f" +{money.unpriced} unpriced" if money.unpriced else "") for money in sums),
            " ".join(str(money.saved) for money in sums),
            ago(each.last_ns, now_ns),
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        lines.append(_paint(line, _MUTED, colour) if number == 0 else line)
    return "\n".join(lines)


def run_waterfall(records: Sequence[RequestRecord], *, width: int = 120, colour: bool = False) -> str:
    """One run: a head with exact totals, then a line a step with its time and its tokens to scale."""
    views = [run_view(page_of(records, page)) for page in range(1, pages_of(len(records)) + 1)]
    width = max(width, MIN_WIDTH)
    name_width = min(
        30 if width >= 110 else 18, max([8, *(len(printable(step.name)) for view in views for step in view.steps)])
    )
    room = width - (4 + name_width + 2 + 2 + 7 + 10 + 15 + 15)
    time_width = max(10, room // 2)
    token_width = max(10, room - time_width)
    lines = [_head(views[0], colour), ""]
    header = f"{'#':>4}  {'STEP':<{name_width}}{'TIME':<{time_width + 2}}{'TOKENS':<{token_width}}"
    header += f"{'WARM':>7}{'TTFT':>10}{'COST':>15}{'SAVED':>15}"
    lines.append(_paint(header, _MUTED, colour))
    for view in views:
        for step in view.steps:
            lines += _step_lines(step, name_width, time_width, token_width, colour)
    lines += ["", _legend(views[0], colour)]
    return "\n".join(lines)


def _head(view: RunView, colour: bool) -> str:
    title = printable(view.run_id) + (f"  {printable(view.agent)}" if view.agent else "")
    sums = "; ".join(
        f"cost {each.cost}, saved {each.saved}" + (f", {each.unpriced} unpriced" if each.unpriced else "")
        for each in view.money
    )
    facts = f"{printable(view.models)}, {view.when_utc}, {view.elapsed}, {of('step', view.steps_total)}"
    failed = f", {view.failed} failed" if view.failed else ""
    return "\n".join((
        title,
        _paint(facts, _MUTED, colour) + _paint(failed, _BAD, colour),
        f"{view.prompt} prompt tokens, {view.hit_share} served warm ({view.hits}), {view.output} output tokens,"
        f" TTFT p50 {view.ttft_p50}",
        sums,
    ))  # fmt: skip


def _step_lines(step: StepView, name_width: int, time_width: int, token_width: int, colour: bool) -> list[str]:
    name = _cut(printable(step.name), name_width - 1)
    cost = str(step.cost) if step.cost is not None else "unpriced"
    saved = str(step.saved) if step.saved is not None else "–"
    lines = [
        f"{step.step:>4}  {_paint(f'{name:<{name_width}}', _BAD if step.failed else None, colour)}"
        f"{_bar(step.time, time_width, colour)}  {_bar(step.bar, token_width, colour)}"
        f"{step.hit_share:>7}{step.ttft:>10}{cost:>15}{_paint(f'{saved:>15}', _GOOD, colour)}"
    ]
    notes = [f"on {printable(step.instance)}"]
    if step.error:
        notes.append(printable(step.error))
    if len(step.attempts) > 1:
        notes.append(f"{len(step.attempts)} attempts")
    if step.failed or len(step.attempts) > 1:
        lines.append(" " * 6 + _paint(", ".join(notes), _BAD if step.failed else _MUTED, colour))
    for gap in step.gaps_after:
        label = _paint(f"{'└ ' + _cut(printable(gap.label), name_width - 3):<{name_width}}", _MUTED, colour)
        lines.append(f"{'':6}{label}{_bar(gap.segments, time_width, colour)}  {_paint(gap.bounded, _MUTED, colour)}")
    return lines


def _bar(segments: Sequence[Segment], width: int, colour: bool) -> str:
    """A bar of ``width`` cells; a segment that says something has at least one, as long as there is one left."""
    cells = [" "] * width
    taken = 0
    for each in segments:
        start = float(each.x[:-1]) * width / 100
        length = float(each.width[:-1]) * width / 100
        if each.kind in _SLIGHT and length < 0.5:
            continue
        first = max(taken, min(int(start), width - 1))
        last = min(width, max(round(start + length), first + (length > 0)))
        ink, shade = _INK.get(each.kind, ("█", 250))
        for cell in range(first, last):
            cells[cell] = _paint(ink, shade, colour)
        taken = max(taken, last)
    return "".join(cells)


def _legend(view: RunView, colour: bool) -> str:
    inks = [(_INK[each.kind], each.name.lower()) for each in view.legend]
    words = {"prefill": "to the first token", "decode": "generating", "tool": "tool, at most"}
    inks += [(_INK[kind], word) for kind, word in words.items()]
    return "  ".join(f"{_paint(ink, shade, colour)} {name}" for (ink, shade), name in inks)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _paint(text: str, shade: int | None, colour: bool) -> str:
    return f"\x1b[38;5;{shade}m{text}{_RESET}" if colour and shade is not None and text.strip() else text
