"""Aligned text for terminals, and names that clients chose in files that others open. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_FORMULAS: Final = tuple("=+-@＝＋－＠")
_NOTHING: Final = "-"


def aligned(lines: Sequence[Sequence[str]], left_columns: int) -> str:
    """Return lines as columns, the first line as head over a rule; the first columns stand left, the others right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if column < left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([text[0], rule, *text[1:]]) + "\n"


def counted(count: int, noun: str) -> str:
    """Return ``1 row``, ``2 rows``, ``1,000 rows``: for nouns whose plural ends in an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(value: str) -> str:
    """Keep a name that a client chose from steering the terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in value)


def spreadsheet_text(value: str) -> str:
    """Keep a name that a client chose from steering who opens the file: no control character, and no formula."""
    text = value if value.isprintable() else printable(value)
    return f"'{text}" if text != _NOTHING and text.lstrip(" \ufffd").startswith(_FORMULAS) else text
