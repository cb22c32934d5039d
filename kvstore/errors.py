"""What the store raises.

::

    StoreError
    ├── MediumError          a tier cannot be opened: no space, no permission, not a directory, no server binary
    │   └── MediumInUse      another process has this disk tier open
    └── RecordError          a stored header does not verify; tiers turn it into a miss and an alarm

Once a tier is open its faults are misses, counted and logged, and nothing is raised (see ``kvstore.tiers.base``).
``ValueError`` is for programmer errors.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of everything the store raises."""


class MediumError(StoreError):
    """A tier's medium cannot be opened; the message says which and why."""


class MediumInUse(MediumError):
    """Another process has this disk tier open."""


class RecordError(StoreError):
    """A stored header does not verify; ``reason`` is the alarm's name: "format", "record", "key" or "length"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
