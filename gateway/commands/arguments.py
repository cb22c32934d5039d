"""What command lines name, read with a clear error: numbers within bounds, which argparse takes too readily; files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

from gateway.errors import SettingsError

_BILLION = 10**9
YEAR_S = 366 * 86_400


def whole_number(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    """Return what reads a whole number within bounds, for ``type=``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not within {least:,} to {most:,}")
        return number

    return read


def exact_number(text: str) -> Decimal:
    """Read a decimal number below a billion either way, for ``type=``."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not (value.is_finite() and abs(value) < _BILLION):
        raise argparse.ArgumentTypeError(f"{text} is no number below {_BILLION:,}")
    return value


def real_number(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Return what reads a number within bounds, for ``type=``; with ``above`` it must be more than the least."""

    def read(text: str) -> float:
        value = _float(text)
        if not least <= value <= most or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if above else 'from'} {least:g} to {most:g}")
        return value

    return read


def seconds(text: str) -> float:
    """Read a time above 0 and within a year, for ``type=``."""
    value = _float(text)
    if not 0 < value <= YEAR_S:
        raise argparse.ArgumentTypeError(f"{text} is no time above 0 s and within a year")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def told(error: Exception) -> str:
    """Return an error in words: of one of the system's, what it is about and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def text_of(path: Path) -> str:
    """Return what a file of text holds, with a byte order mark or without. Raises ``SettingsError``."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise SettingsError(told(error)) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start:,}") from error
