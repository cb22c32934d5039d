"""Expressions by which tokenizers split text, as tables: where a match ends is found by one look-up a character.

Tokenizers' expressions need little: alternatives, groups, quantifiers, and a look at the one character behind. For
these a table says for each state and each class of characters which state is next, and whether a match ended before the
character. Of all matches from a place it finds the one that Python's engine finds: the first alternative that goes,
each quantifier as greedy as it can be. Made once for a tokenizer; ASCII only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

END = 128
"""Stands for the text's end where a character could stand."""

MATCHED = 0x8000
"""In an entry: a match ended before this character. The rest of it is the next state, 0 for none."""

_START = 1
_MOST_STATES = 2000
_MOST_REPEATS = 16
_ATOM = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])+\]|[^\\\[\]|()*+?{}]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(i?:|!))?")
_QUANTIFIER = re.compile(r"([*+?]|\{(\d+)(?:(,)(\d*))?\})")


class UnsupportedExpression(ValueError):
    """The expression says something that tables are not made for here."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """One expression. ``classes``: one byte for each of the 128 characters and ``END``; ``table``: native 16-bit
    entries, ``width`` a state. A match begins in state 1."""

    classes: bytes
    table: bytes
    width: int


class _Step(NamedTuple):
    """One step of a match: ``chars`` to take, or, ``not_ahead``, not to be next; else both ways to go on, the better
    first, as distances from here. None of it: the match's end."""

    chars: frozenset[int] = frozenset()
    not_ahead: bool = False
    ways: tuple[int, int] | None = None


_MATCH = _Step()
_Steps = list[_Step]


@lru_cache(64)
def automaton(expression: str) -> Automaton:
    """Return the tables of an expression. Raises ``UnsupportedExpression`` and ``re.error``.

    Some milliseconds, so what was made is kept: a tokenizer's words are forgotten and learned anew while it serves.
    """
    parser = _Parser(expression)
    steps = parser.alternatives(ignores_case=False)
    if parser.at < len(expression):
        raise UnsupportedExpression(f"{expression[parser.at :]!r} ends nothing")
    return _tables([*steps, _MATCH])


class _Parser:
    """From an expression to steps."""

    def __init__(self, expression: str) -> None:
        self._expression, self.at = expression, 0

    def alternatives(self, *, ignores_case: bool) -> _Steps:
        """Read alternatives up to the group's end."""
        ways = [self._sequence(ignores_case)]
        while self._take("|"):
            ways.append(self._sequence(ignores_case))
        steps = ways.pop()
        while ways:
            first = ways.pop()
            steps = [_split(1, len(first) + 2), *first, _split(len(steps) + 1, len(steps) + 1), *steps]
        return steps

    def _sequence(self, ignores_case: bool) -> _Steps:
        steps = _Steps()
        while self.at < len(self._expression) and self._expression[self.at] not in "|)":
            steps += self._repeated(self._one(ignores_case))
        return steps

    def _one(self, ignores_case: bool) -> _Steps:
        if (group := _GROUP.match(self._expression, self.at)) is None:
            return [_Step(self._chars(ignores_case))]
        self.at, kind = group.end(), group[1] or ""
        inner = self.alternatives(ignores_case=ignores_case or kind.startswith("i"))
        if not self._take(")"):
            raise UnsupportedExpression("a group of another kind")
        if kind != "!":
            return inner
        if len(inner) != 1 or inner[0].not_ahead:
            raise UnsupportedExpression("a look ahead at more than a character")
        return [inner[0]._replace(not_ahead=True)]

    def _chars(self, ignores_case: bool) -> frozenset[int]:
        """Read what stands for one character; Python's engine says which ones it takes."""
        atom = _ATOM.match(self._expression, self.at)
        if atom is None or atom[0] in "^$" or (atom[0][0] == "\\" and atom[0][1] in "bBAZ123456789"):
            raise UnsupportedExpression(f"{self._expression[self.at :]!r} begins with no character")
        self.at = atom.end()
        takes = re.compile(atom[0], re.ASCII | (re.IGNORECASE if ignores_case else 0)).fullmatch
        return frozenset(code for code in range(END) if takes(chr(code)))

    def _repeated(self, steps: _Steps) -> _Steps:
        quantifier = _QUANTIFIER.match(self._expression, self.at)
        if quantifier is None:
            return steps
        self.at = quantifier.end()
        if self._expression[self.at : self.at + 1] in ("?", "+", "*", "{"):
            raise UnsupportedExpression("a quantifier that is not greedy")
        least, most = _bounds(quantifier)
        if max(least, most or 0) > _MOST_REPEATS:
            raise UnsupportedExpression("many repetitions")
        if most is None:
            again = [_split(1, len(steps) + 2), *steps, _split(-len(steps) - 1, -len(steps) - 1)]
            return steps * least + again
        rest = _Steps()
        for _ in range(most - least):
            rest = [_split(1, len(steps) + len(rest) + 1), *steps, *rest]
        return steps * least + rest

    def _take(self, char: str) -> bool:
        found = self._expression.startswith(char, self.at)
        self.at += found
        return found


def _split(first: int, second: int) -> _Step:
    return _Step(ways=(first, second))


def _bounds(quantifier: re.Match[str]) -> tuple[int, int | None]:
    match quantifier[1]:
        case "*":
            return 0, None
        case "+":
            return 1, None
        case "?":
            return 0, 1
        case _:
            least = int(quantifier[2])
            if quantifier[3] is None:
                return least, least
            return least, int(quantifier[4]) if quantifier[4] else None


def _tables(steps: Sequence[_Step]) -> Automaton:
    """Follow all ways at once, those of each place as one state."""
    sets = [step.chars for step in steps]
    kinds: dict[tuple[bool, ...], int] = {}
    classes = [kinds.setdefault(tuple(code in chars for chars in sets), len(kinds)) for code in range(END)]
    examples = [classes.index(kind) for kind in range(len(kinds))] + [END]
    start: tuple[int, ...] = (0,)
    states, rows = {start: _START}, list[list[int]]()
    for state in (reached := [start]):
        row = list[int]()
        for char in examples:
            is_matched, ahead = _next(steps, state, char)
            if is_matched and state is start:
                raise UnsupportedExpression("it matches nothing")
            if ahead and ahead not in states:
                states[ahead] = len(states) + _START
                reached.append(ahead)
            row.append((MATCHED if is_matched else 0) | (states[ahead] if ahead else 0))
        rows.append(row)
        if len(states) > _MOST_STATES:
            raise UnsupportedExpression("too many states")
    width = len(examples)
    entries = [0] * width + [entry for row in rows for entry in row]
    table = b"".join(entry.to_bytes(2, sys.byteorder) for entry in entries)
    return Automaton(bytes([*classes, width - 1]), table, width)


def _next(steps: Sequence[_Step], state: Sequence[int], char: int) -> tuple[bool, tuple[int, ...]]:
    """Tell whether a match ended before ``char``, and where the better ways stand behind it, the best first."""
    ahead: dict[int, None] = {}
    for place in _reached(steps, state, char):
        if steps[place] is _MATCH:
            return True, tuple(ahead)
        if char in steps[place].chars:
            ahead[place + 1] = None
    return False, tuple(ahead)


def _reached(steps: Sequence[_Step], state: Sequence[int], char: int) -> Iterator[int]:
    """Yield the steps that take a character, or end, where ``char`` is next; the better ones first."""
    seen, waiting = set[int](), list(reversed(state))
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        step = steps[place]
        if step.ways is not None:
            first, second = step.ways
            waiting += [place + second, place + first]
        elif step.not_ahead:
            if char not in step.chars:
                waiting.append(place + 1)
        else:
            yield place
