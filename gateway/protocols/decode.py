"""JSON of engines, which may be anything."""

from __future__ import annotations

import json

import msgspec

from gateway.errors import UpstreamUnusable


def json_object(data: bytes) -> dict[str, object] | None:
    """Return a JSON object, ``None`` for anything else."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def refuse_half(body: bytes) -> None:
    """Raises ``UpstreamUnusable`` for an answer that is no JSON, as one whose connection ended in its middle.

    What parsers take that are less strict than ours (``NaN``, half a surrogate pair) passes. O(body).
    """
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            raise UpstreamUnusable("the engine's answer is no JSON, or a part of it", code="answer_broken") from None
