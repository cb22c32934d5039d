"""Affinity by text, for prompts whose token ids cannot be known here: no tokenizer, media, a template by the client.

The conversation's bytes are hashed in chunks of about a block's length, chained like blocks. Requests with the same
beginning share leading chunks and so find each other's instance. The hashes match nothing that an engine announces, and
say nothing of what it holds: whoever uses them must call the decision inexact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec
import numpy as np

from engine_adapter.media import has_media, media_of, medium_name, with_texts
from engine_adapter.messages import PART_SEPARATOR
from kvstore.block import routing_hash_array, routing_seed

BYTES_PER_TOKEN = 4
"""A rough mean over languages and tokenizers; it makes a chunk about as long as a block."""

_ADAPTER = "\0text-chunks"  # keeps these hashes apart from those of token ids; no adapter can be named so
_encoder = msgspec.msgpack.Encoder()


def conversation_bytes(messages: Sequence[Mapping[str, object]] | None, tools: object, prompt: object) -> bytes | None:
    """Return what a prompt says, in the order in which models read it; ``None`` where that has no bytes.

    A longer conversation's bytes begin with a shorter one's. Media stand there by name. What templates print alike is
    alike, however clients spell it: text in parts, with cache markers or without, content that is null, empty or left
    out, and members in any order.
    """
    try:
        if messages is not None and has_media(messages):
            messages = with_texts(messages, (medium_name(medium).hex() for medium in media_of(messages)))
        items = [tools, *map(_as_printed, messages)] if messages is not None else [prompt]
        return b"".join(map(_encoder.encode, items))
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
        return None


def _as_printed(message: Mapping[str, object]) -> dict[str, object]:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        told = [text for text in texts if isinstance(text, str)]
        content = PART_SEPARATOR.join(told) if len(told) == len(content) else content
    rest = {name: value for name, value in sorted(message.items()) if value is not None and name != "content"}
    return {**rest, "content": content} if content else rest


def chunk_hashes(data: bytes, block_sizes: Iterable[int], model: str, salt: str | None) -> Mapping[int, Sequence[int]]:
    """Return one chained hash for each full chunk of ``4 * size`` bytes, for each block size. O(bytes)."""
    words = cast("Sequence[int]", np.frombuffer(data, "<u4", count=len(data) // BYTES_PER_TOKEN))
    seed = routing_seed(model, _ADAPTER, salt)
    return {size: cast("Sequence[int]", routing_hash_array(words, size, seed)) for size in block_sizes}
