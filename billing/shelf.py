"""Several price books at once: which one prices a request follows from its model and from who answers it. Pure.

Each book keeps its own currency, and nothing is ever converted. The first book of the shelf whose patterns fit is the
one, whether it has a price or not: a model that it does not know is unpriced, not priced by the next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache

from billing.prices import LOOKUP_CACHE_ENTRIES, PriceBook


@dataclass(frozen=True, slots=True)
class ShelvedBook:
    """A book, and for which models (as instances name them) and instances it is. ``*`` and ``?`` as in file names."""

    book: PriceBook
    models: tuple[str, ...] = ("*",)
    instances: tuple[str, ...] = ("*",)


class PriceShelf:
    """An ordered set of books; the last one is for whatever no other fits."""

    def __init__(self, default: PriceBook, others: Sequence[ShelvedBook] = ()) -> None:
        self.default = default
        self._others = [(_pattern(each.models), _pattern(each.instances), each.book) for each in others]
        self._find = lru_cache(LOOKUP_CACHE_ENTRIES)(self._first)

    @property
    def books(self) -> tuple[PriceBook, ...]:
        """All books, the default one first."""
        return (self.default, *(book for _, _, book in self._others))

    def book_for(self, model: str, instance: str | None = None) -> PriceBook:
        """Return the book of a request. Before it is known who answers, books for some instances only don't fit."""
        return self._find(model, instance or "")

    def _first(self, model: str, instance: str) -> PriceBook:
        for models, instances, book in self._others:
            if models.fullmatch(model) and instances.fullmatch(instance):
                return book
        return self.default


def _pattern(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(translate(name) for name in names))
