"""What this package raises.

```
RadixIndexError
├── UnknownHolderError     an instance or a pool that was never added, or was removed
└── SnapshotError          bytes that are no snapshot of this version, or not a whole one
```

Nothing an engine says raises: an event that makes no sense is ignored and counted (``radix_index.source``).
"""

from __future__ import annotations


class RadixIndexError(Exception):
    """The root of this package's errors."""


class UnknownHolderError(RadixIndexError, KeyError):
    """The named instance or pool is not in the index."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder

    def __str__(self) -> str:
        return f"no instance or pool named {self.holder!r} is in the index"


class SnapshotError(RadixIndexError):
    """Bytes that are no snapshot of this version, or not a whole one."""
