"""From tokens and times to positions on a bar, in percent of its width. Pure arithmetic, no markup."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.console.formats import count, share
from tracing.record import Usage

_STEPS: Final = (1, 2, 5)
_CLOCK_STEPS_S: Final = (10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
_DAY_NS: Final = 86_400 * 10**9
_TICK_ROOM: Final = 13.0  # percent of the axis that a label takes
_SLIVER: Final = 0.4  # percent: what is shorter is drawn this wide, or it could not be seen
TOKEN_CLASSES: Final = (
    ("device", "Device", "read from the accelerator's memory"),
    ("host", "Host", "read from host memory"),
    ("disk", "Disk", "read from disk"),
    ("pool", "Pool", "read from the shared pool"),
    ("unknown", "Cached", "cached, the engine does not say where"),
    ("fresh", "Computed", "computed, nothing of it was warm"),
    ("written", "Written", "computed and billed as a cache write"),
    ("output", "Output", "generated"),
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a bar: a CSS class, position and width in percent as text, and what it says when pointed at."""

    kind: str
    x: str
    width: str
    title: str


def token_counts(usage: Usage) -> tuple[int, ...]:
    """The counts of :data:`TOKEN_CLASSES`, in that order: the order in which they lie in the prompt."""
    return (
        usage.hit_device_tokens,
        usage.hit_host_tokens,
        usage.hit_disk_tokens,
        usage.hit_pool_tokens,
        usage.hit_unknown_tokens,
        usage.fresh_tokens,
        usage.written_tokens,
        usage.output_tokens,
    )


def token_bar(counts: Sequence[int], scale_tokens: int, notes: Sequence[str] = ()) -> tuple[Segment, ...]:
    """A bar of the token classes to the scale of ``scale_tokens`` for the full width; ``notes``: more on each class."""
    total = sum(counts)
    segments: list[Segment] = []
    start = 0
    for place, ((kind, name, meaning), tokens) in enumerate(zip(TOKEN_CLASSES, counts, strict=False)):
        if tokens:
            note = notes[place] if place < len(notes) else ""
            title = f"{name}: {count(tokens)} tokens ({share(tokens, total)}), {note or meaning}"
            segments.append(Segment(kind, percent(start, scale_tokens), percent(tokens, scale_tokens), title))
        start += tokens
    return tuple(segments)


def percent(part: int, whole: int) -> str:
    """``part`` of ``whole`` as a CSS length of two decimals."""
    return f"{100 * part / whole:.2f}%" if whole > 0 else "0%"


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of a time axis."""

    x: str
    label: str


class TimeScale:
    """Times on a common axis on which long idle stretches are cut short, so that the work stays visible.

    Between the cuts the axis is linear. A stretch in which nothing ran and that is longer than a third of all the
    work's time takes that third's room, whatever its length.
    """

    def __init__(self, busy: Iterable[tuple[int, int]]) -> None:
        merged = _merge(busy)
        total = sum(end - start for start, end in merged) or 1
        limit = max(total // 3, 1)
        self._knots_ns: list[int] = []
        self._knots_at: list[int] = []
        self.cuts: list[tuple[int, int]] = []
        at = 0
        for start, end in merged:
            if self._knots_ns:
                idle = start - self._knots_ns[-1]
                if idle > limit:
                    self.cuts.append((self._knots_ns[-1], start))
                at += min(idle, limit)
            self._knots_ns += [start, end]
            self._knots_at += [at, at := at + end - start]
        self._length = max(at, 1)

    @property
    def start_ns(self) -> int:
        """Where the axis begins."""
        return self._knots_ns[0] if self._knots_ns else 0

    def at(self, ns: int) -> float:
        """The position of a moment, in percent; moments outside the axis lie on its ends."""
        right = bisect_right(self._knots_ns, ns)
        if right == 0:
            return 0.0
        if right == len(self._knots_ns):
            return 100.0 * self._knots_at[-1] / self._length
        start, end = self._knots_ns[right - 1], self._knots_ns[right]
        low, high = self._knots_at[right - 1], self._knots_at[right]
        return 100.0 * (low + (high - low) * (ns - start) / (end - start)) / self._length

    def segment(self, kind: str, start_ns: int, end_ns: int, title: str, *, seen: bool = False) -> Segment:
        """A bar's part from one moment to another; ``seen``: however short it was."""
        start, end = self.at(start_ns), self.at(end_ns)
        width = max(end - start, _SLIVER if seen else 0.0)
        return Segment(kind, f"{min(start, 100.0 - width):.2f}%", f"{width:.2f}%", title)

    def ticks(self, wanted: int = 7) -> tuple[Tick, ...]:
        """Round times since the start that lie on uncut stretches of the axis, at most about ``wanted``."""
        if not self._knots_ns:
            return ()
        step_ns = _round_step(self._length // wanted)
        ticks: list[Tick] = []
        for start, end in zip(self._knots_ns[:-1], self._knots_ns[1:], strict=True):
            if (start, end) in self.cuts:
                continue
            first = -(-(start - self.start_ns) // step_ns) * step_ns
            for elapsed in range(first, end - self.start_ns + 1, step_ns):
                at = self.at(self.start_ns + elapsed)
                if not ticks or at - float(ticks[-1].x[:-1]) >= _TICK_ROOM:
                    ticks.append(Tick(f"{at:.2f}%", _tick_label(elapsed)))
        return tuple(tick for tick in ticks if float(tick.x[:-1]) <= 100.0 - _TICK_ROOM / 2)


def _merge(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted((start, max(start, end)) for start, end in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _tick_label(elapsed_ns: int) -> str:
    """A round time without idle decimals."""
    if elapsed_ns == 0:
        return "0"
    if elapsed_ns >= 60 * 10**9:
        minutes, seconds = divmod(elapsed_ns // 10**9, 60)
        return f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if elapsed_ns >= size:
            return f"{elapsed_ns / size:g} {unit}"
    return f"{elapsed_ns} ns"


def _round_step(rough_ns: int) -> int:
    """The smallest round duration that is not shorter: decimal below ten seconds, then as clocks divide."""
    size = 1
    while size < 10**10:
        for step in _STEPS:
            if size * step >= rough_ns:
                return size * step
        size *= 10
    return next(
        (step * 10**9 for step in _CLOCK_STEPS_S if step * 10**9 >= rough_ns), -(-rough_ns // _DAY_NS) * _DAY_NS
    )
