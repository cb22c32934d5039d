"""JSON of engines, which may be anything."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gateway.errors import UpstreamUnusable

HALF_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
"""What begins an escape that is half of a surrogate pair, the other half behind it or not."""


def json_object(data: bytes) -> dict[str, object] | None:
    """Return a JSON object, ``None`` for anything else. Half of a surrogate pair that stands alone is U+FFFD in it."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        value = mended(with_halves(data))
    return value if isinstance(value, dict) else None


def with_halves(data: bytes) -> Any:
    """Return the value of a JSON text in which halves of surrogate pairs stand alone, halves included; ``None`` for any
    other text."""
    if HALF_ESCAPE.search(data) is None:
        return None
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            pass
    return None


def whole_pairs(body: bytes) -> bytes:
    """Return a JSON text without lone halves; the same bytes where it has none, or is no JSON. O(body)."""
    value = with_halves(body)
    return body if value is None else msgspec.json.encode(mended(value))


def mended(value: Any) -> Any:
    """Return a value in whose texts no half of a pair is alone."""
    if isinstance(value, str):
        return mended_text(value)
    if isinstance(value, list):
        return [mended(each) for each in value]
    if isinstance(value, dict):
        return {mended_text(name): mended(each) for name, each in value.items()}
    return value


def mended_text(text: str) -> str:
    """Return a text with halves that belong together as one character, and lone ones as U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def refuse_half(body: bytes) -> None:
    """Raises ``UpstreamUnusable`` for an answer that is no JSON, as one whose connection ended in its middle.

    What parsers take that are less strict than ours (``NaN``) passes. O(body).
    """
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            raise UpstreamUnusable("the engine's answer is no JSON, or a part of it", code="answer_broken") from None
