"""Values of command-line arguments that argparse takes too readily: numbers within bounds, else a clear error."""

from __future__ import annotations

import argparse
from collections.abc import Callable


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
