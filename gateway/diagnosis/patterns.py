"""What two different pieces of text are: two dates, two identifiers, two states of a counter, or other words. Pure.

A difference is widened to the pattern that it lies in, so that a clock of which only the seconds moved is told as the
whole time stamp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tracing.detail import BreakKind

WINDOW_CHARS: Final = 80
"""How far around a difference a pattern is looked for."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:\s?[ap]\.?m\.?)?"
_ZONE = r"(?:\s?(?:z|utc|gmt|[+-]\d{2}:?\d{2}))?"
_PATTERNS: Final = (
    (BreakKind.UUID, re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.I)),
    (BreakKind.UUID, re.compile(r"\b[0-9A-HJKMNP-TV-Z]{26}\b")),  # ULID
    (
        BreakKind.TIMESTAMP,
        re.compile(
            rf"\b\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:[t ,]{{1,2}}{_CLOCK}{_ZONE})?"
            rf"|\b\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}(?:[t ,]{{1,2}}{_CLOCK}{_ZONE})?"
            rf"|\b(?:{_DAY},?\s)?{_MONTH}\s\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s\d{{4}})?(?:[ ,at]{{1,4}}{_CLOCK}{_ZONE})?"
            rf"|\b(?:{_DAY},?\s)?\d{{1,2}}\.?\s{_MONTH}(?:\s\d{{4}})?(?:[ ,at]{{1,4}}{_CLOCK}{_ZONE})?"
            rf"|\b{_CLOCK}{_ZONE}"
            r"|\b1[6-9]\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?\b",  # Unix time: s, ms, µs, ns
            re.I,
        ),
    ),
    (BreakKind.TIMESTAMP, re.compile(rf"\b{_DAY}\b", re.I)),
    (BreakKind.UUID, re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}\b", re.I)),
    (BreakKind.UUID, re.compile(r"\b[a-z]{2,16}[_-](?=\w*\d)(?=\w*[A-Za-z])\w{10,48}\b")),  # req_8fK2…
    (BreakKind.COUNTER, re.compile(r"(?<![\w.])\d{1,12}(?:[.,]\d{1,6})?(?![\w.]*\w)")),
)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where two texts differ first: from ``start`` to ``before_end`` in the one, to ``after_end`` in the other."""

    start: int
    before_end: int
    after_end: int


def differing(before: str, after: str) -> Spot:
    """Return where two different texts differ: behind what they begin with alike, before what they end with alike.

    Cost: a comparison of halves, so that only the last few characters are looked at one by one.
    """
    start = common_prefix(before, after)
    room = min(len(before), len(after)) - start
    tail = common_prefix(before[::-1][:room], after[::-1][:room])
    return Spot(start, len(before) - tail, len(after) - tail)


def common_prefix(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike. O(length), at memory speed."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def told_apart(before: str, after: str) -> tuple[BreakKind | None, Spot]:
    """Return what two different texts differ in first (``None``: in words), and where."""
    spot = differing(before, after)
    for kind, pattern in _PATTERNS:
        old = _covering(pattern, before, spot.start, spot.before_end)
        new = _covering(pattern, after, spot.start, spot.after_end)
        if old is None or new is None or old[0] != new[0] or before[slice(*old)] == after[slice(*new)]:
            continue
        if kind is BreakKind.COUNTER and not _counts(before[slice(*old)], after[slice(*new)]):
            continue
        return kind, Spot(old[0], old[1], new[1])
    return None, spot


def _counts(before: str, after: str) -> bool:
    """Tell whether the second is a later state of a counter: a number that moved a little, or grew."""
    old, new = float(before.replace(",", ".")), float(after.replace(",", "."))
    return old != new and (new > old or abs(new - old) <= max(10.0, old / 10))


def _covering(pattern: re.Pattern[str], text: str, start: int, end: int) -> tuple[int, int] | None:
    """Return where a match lies that covers or touches the beginning of a difference, the first of them."""
    low, high = max(start - WINDOW_CHARS, 0), min(max(end, start) + WINDOW_CHARS, len(text), start + 4 * WINDOW_CHARS)
    for match in pattern.finditer(text, low, high):
        if match.start() <= start < match.end() or start == end == match.end():
            return match.span()
        if match.start() > start:
            return None
    return None
