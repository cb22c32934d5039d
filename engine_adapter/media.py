"""Media: images, sound, video and files in a conversation, each named by what it is.

What an engine puts into a prompt for a medium is its model's own affair. Here a medium is a name of a few words, equal
for the same content: the decoded bytes of a ``data:`` URL (or of a member that holds base64), the text of any other
URL, labelled as such, since what is behind it can change.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from engine_adapter.ids import Ids

NAME_BYTES = 32
"""Of a medium's name: as many as eight tokens have."""

_TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
_BASE64_MEMBERS = frozenset({"data", "file_data"})
_encoder = msgspec.msgpack.Encoder(order="sorted")


def is_medium(part: object) -> bool:
    """Tell whether a part of a content is something else than text."""
    return isinstance(part, Mapping) and isinstance(kind := part.get("type"), str) and kind not in _TEXTS


def has_media(messages: Sequence[Mapping[str, object]]) -> bool:
    """Tell whether any message holds a medium. O(parts)."""
    return any(True for _ in media_of(messages))


def media_of(messages: Sequence[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
    """Yield every medium, in the order in which models read them."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if is_medium(part):
                yield part


def with_texts(messages: Sequence[Mapping[str, object]], texts: Iterator[str]) -> list[Mapping[str, object]]:
    """Return the messages with each medium replaced by the next of ``texts``."""
    shown: list[Mapping[str, object]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(map(is_medium, content)):
            parts = [{"type": "text", "text": next(texts)} if is_medium(part) else part for part in content]
            message = {**message, "content": parts}
        shown.append(message)
    return shown


def medium_name(part: Mapping[str, object]) -> bytes:
    """Return the name of a medium: 32 bytes of a digest over its type, its content and what else it says of itself.

    O(bytes). The spelling of base64 and the media type that a ``data:`` URL claims don't count.
    """
    return blake2b(_encoder.encode(_named(part)), digest_size=NAME_BYTES).digest()


def medium_ids(part: Mapping[str, object]) -> Ids:
    """Return the name as if it were token ids."""
    return np.frombuffer(medium_name(part), "<u4").astype(np.uint32)


def _named(value: object, name: str = "") -> object:
    if isinstance(value, Mapping):
        return {
            key: _named(item, key if isinstance(key, str) else "")
            for key, item in value.items()
            if key != "cache_control"
        }
    if isinstance(value, list):
        return [_named(item) for item in value]
    if not isinstance(value, str):
        return value
    if name == "url" or name.endswith("_url"):
        head, comma, data = value.partition(",")
        if head[:5].lower() != "data:" or not comma:
            return ["url", value.encode("utf-8", "surrogatepass")]
        return _content(data) if head.lower().endswith(";base64") else ["data", data.encode("utf-8", "surrogatepass")]
    return _content(value) if name in _BASE64_MEMBERS else value.encode("utf-8", "surrogatepass")


def _content(text: str) -> list[object]:
    try:
        return ["bytes", base64.b64decode("".join(text.split()).encode("ascii"), validate=True)]
    except (UnicodeEncodeError, binascii.Error):
        return ["text", text.encode("utf-8", "surrogatepass")]
