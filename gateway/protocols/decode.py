"""JSON of engines, which may be anything."""

from __future__ import annotations

import msgspec


def json_object(data: bytes) -> dict[str, object] | None:
    """Return a JSON object, ``None`` for anything else."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
