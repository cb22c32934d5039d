"""A Messages answer, written: as a stream of named events or as one body."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.protocols.answer import AnswerEvent, Block, Closed, Grew, Kind, Opened
from gateway.protocols.anthropic.answer import (
    Json,
    Shown,
    is_shown,
    message,
    opened_block,
    opening,
    signature,
    stop_of,
    usage_of,
)
from gateway.protocols.anthropic.errors import error_event
from gateway.protocols.sse import named_event
from gateway.protocols.translated import Finish
from tracing.record import Usage

_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REFUSAL: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """``AnswerWriter`` for Messages: ``message_start``, blocks, ``message_delta``, ``message_stop``."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._index = -1  # of the block that is open, among those shown

    def begin(self) -> bytes:
        """Return ``message_start``."""
        return _event("message_start", {"message": opening(self._shown)})

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """Return the blocks' events."""
        return b"".join(self._block_event(event) for event in events if is_shown(event.block, self._shown))

    def end(self, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> bytes:
        """Return ``message_delta``, with the counts of the whole answer, and ``message_stop``."""
        delta: Json = {"delta": stop_of(blocks, finish), "usage": usage_of(usage)}
        return _event("message_delta", delta) + _event("message_stop", {})

    def failure(self, error_body: bytes) -> bytes:
        """Return ``error``, after which nothing comes."""
        return error_event(error_body)

    def whole(self, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> bytes:
        """Return the message."""
        return msgspec.json.encode(message(self._shown, blocks, finish, usage))

    def _block_event(self, event: AnswerEvent) -> bytes:
        if isinstance(event, Opened):
            self._index += 1
            return _event("content_block_start", {"index": self._index, "content_block": opened_block(event.block)})
        if isinstance(event, Grew):
            kind, member = _DELTAS[event.block.kind]
            return self._delta({"type": kind, member: event.text})
        assert isinstance(event, Closed)
        signed = b""
        if event.block.kind is Kind.REASONING:
            signed = self._delta({"type": "signature_delta", "signature": signature(event.block)})
        return signed + _event("content_block_stop", {"index": self._index})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})


def _event(name: str, members: Json) -> bytes:
    return named_event(name, msgspec.json.encode({"type": name, **members}))
