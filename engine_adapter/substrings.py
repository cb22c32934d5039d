"""Whether a text holds any of some strings: most texts are dismissed by a search for their few first characters."""

from __future__ import annotations

from collections.abc import Iterable


class Substrings:
    """Strings that are looked for together. Immutable."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)
        self._firsts = tuple(sorted({string[:1] for string in self.strings}))
        self._openings = tuple(sorted({string[:2] for string in self.strings}))

    def may_be_in(self, text: str) -> bool:
        """Tell whether any of the strings may be in a text, by their first two characters."""
        for first in self._firsts:  # one, mostly
            if first in text:
                return any(opening in text for opening in self._openings)
        return False

    def are_in(self, text: str) -> bool:
        """Tell whether any of the strings is in a text."""
        return self.may_be_in(text) and any(string in text for string in self.strings)
