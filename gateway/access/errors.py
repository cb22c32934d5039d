"""What the store of keys raises.

AccessError
├── AccessUnavailable   the store cannot be reached, or others keep it busy: the same again may succeed
├── AccessRefused       what is asked for cannot be: a name that is taken, or none, or not known
└── (any other)         the store is none, or of another version
"""

from __future__ import annotations


class AccessError(Exception):
    """The store of keys cannot be used."""


class AccessUnavailable(AccessError):
    """The store cannot be reached now."""


class AccessRefused(AccessError):
    """What is asked for cannot be. ``is_missing``: since what it is about is not there."""

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing
