"""Tables of words: a text is cut into words, and the ids of those that are known are put in a row.

Compiled (``_words.c``, with the tables of ``automaton``) where there was a C compiler at installation and the
expressions are such that tables can be made of them; else with Python's own expressions, which take six times as long.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from engine_adapter.automaton import UnsupportedExpression, automaton

try:  # where there was a C compiler at installation
    from engine_adapter import _words
except ImportError:
    _words = None  # type: ignore[assignment]

_MOST_LEVELS = 8


class WordTable(Protocol):
    """Known words of one way to split. Texts and words are ASCII, ids native ``uint32`` as bytes. For many threads."""

    def split(self, text: str) -> list[str]:
        """Return the words of a text, which joined are the text."""

    def encode(self, text: str, more: Mapping[str, bytes]) -> bytes | list[str]:
        """Return the ids of a text, or those of its words that are neither known nor in ``more``."""

    def add(self, word: str, ids: bytes) -> None:
        """Make a word known."""

    def __len__(self) -> int:
        """Return how many words are known."""


def word_table(expressions: Sequence[str]) -> WordTable:
    """Return an empty table for a text that is split by each expression in turn. Raises ``re.error``."""
    patterns = [re.compile(f"({expression})", re.ASCII) for expression in expressions]
    if _words is not None and len(patterns) <= _MOST_LEVELS:
        try:
            return CompiledTable(expressions)
        except UnsupportedExpression:
            pass
    return PatternTable(patterns)


class CompiledTable:
    """The compiled loop."""

    def __init__(self, expressions: Iterable[str]) -> None:
        """Raises ``UnsupportedExpression``."""
        levels = [(made.classes, made.table, made.width) for made in map(automaton, expressions)]
        self._splitter = _words.splitter(levels, random.getrandbits(64))  # nobody can choose words that collide

    def split(self, text: str) -> list[str]:
        """See ``WordTable``."""
        return _words.split(self._splitter, text)

    def encode(self, text: str, more: Mapping[str, bytes]) -> bytes | list[str]:
        """See ``WordTable``."""
        return _words.encode(self._splitter, text, more)

    def add(self, word: str, ids: bytes) -> None:
        """See ``WordTable``."""
        _words.add(self._splitter, word, ids)

    def __len__(self) -> int:
        """See ``WordTable``."""
        return _words.known(self._splitter)


class PatternTable:
    """The same with Python's expressions, each in one group."""

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = patterns
        self._known: dict[str, bytes] = {}

    def split(self, text: str) -> list[str]:
        """See ``WordTable``."""
        pieces = [text] if text else []
        for pattern in self._patterns:
            pieces = [piece for whole in pieces for piece in _pieces(pattern, whole)]
        return pieces

    def encode(self, text: str, more: Mapping[str, bytes]) -> bytes | list[str]:
        """See ``WordTable``."""
        words, known = self.split(text), self._known
        try:
            return b"".join([known[word] for word in words])
        except KeyError:
            unknown = [word for word in words if word not in known and word not in more]
            return unknown or b"".join([more[word] if word in more else known[word] for word in words])

    def add(self, word: str, ids: bytes) -> None:
        """See ``WordTable``."""
        self._known[word] = ids

    def __len__(self) -> int:
        """See ``WordTable``."""
        return len(self._known)


def _pieces(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return the matches and what lies between them."""
    found: list[str] = pattern.findall(text)
    if "".join(found) == text:
        return found
    return [piece for piece in pattern.split(text) if piece]
