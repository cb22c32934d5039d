"""What a client says of a request's priority: it ranks its own tenant's requests, and gives way to others'."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from gateway.errors import BadRequest

PRIORITY_HEADER = "x-keepwarm-priority"


class Priority(IntEnum):
    """Less is sooner. "batch" comes after everybody's; "interactive" goes first among its own tenant's requests."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2

    @property
    def at_engines(self) -> int:
        """What engines are told that order their queues by it: more is sooner there. A client can come later by its
        own word, never before other tenants."""
        return -1 if self is Priority.BATCH else 0


_WORDS = {priority.name.lower(): priority for priority in Priority}


def priority_of(headers: Mapping[str, str]) -> Priority:
    """Return what the header says. Raises ``BadRequest``."""
    word = headers.get(PRIORITY_HEADER) or "normal"
    found = _WORDS.get(word)
    if found is None:
        raise BadRequest(f"{PRIORITY_HEADER} must be one of {', '.join(_WORDS)}")
    return found
