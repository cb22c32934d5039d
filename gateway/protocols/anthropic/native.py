"""Answers of engines that speak Messages themselves: followed, and shown as they came."""

from __future__ import annotations

from collections.abc import Mapping

from billing.counts import UsageReading
from billing.usage import anthropic_stream_usage
from gateway.protocols.anthropic.errors import error_event
from gateway.protocols.decode import json_object, refuse_half
from gateway.protocols.dialog import arguments_text
from gateway.protocols.model_name import renamed, renamed_in
from gateway.protocols.openai_errors import error_class
from gateway.protocols.seen import Seen
from gateway.protocols.sse import data_of, named_event

Json = Mapping[str, object]

_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls",
            "refusal": "content_filter"}  # fmt: skip
"""Stop reasons by the names that records have for them."""


class NativeMessageReader:
    """``AnswerReader`` over Messages. Changes nothing but the model's name, where the client knows it by another."""

    def __init__(self, model: str | None = None) -> None:
        """``model``: the name to show instead of the engine's own."""
        self._model = model
        self._start_usage: Json | None = None
        self.seen = Seen()

    def has_ended(self) -> bool:
        """Tell whether ``message_stop`` or an error was seen."""
        return self.seen.is_done

    def event(self, event: bytes) -> tuple[bytes, bool]:
        """Take one event; return it, and whether it brought output."""
        data = data_of(event)
        value = None if data is None else json_object(data)
        if value is None or data is None:
            return event, False
        kind, has_output = value.get("type"), False
        if kind == "message_start" and isinstance(message := value.get("message"), dict):
            self._start_usage = _mapping(message.get("usage"))
            self._name(message)
            return self._renamed_start(event, data, message), False
        if kind == "content_block_start":
            has_output = self._block(_index(value), _mapping(value.get("content_block")) or {}, is_whole=False)
        elif kind == "content_block_delta":
            has_output = self._delta(_index(value), _mapping(value.get("delta")) or {})
        elif kind == "message_delta":
            self._stop(_mapping(value.get("delta")) or {})
            self._count(_mapping(value.get("usage")) or {})
        elif kind == "message_stop":
            self.seen.is_done = True
        elif kind == "error":
            self.seen.error, self.seen.is_done = error_class(value.get("error")), True
        self.seen.pieces += has_output
        return event, has_output

    def answer(self, body: bytes) -> bytes:
        """Take a whole message; return it. Raises ``UpstreamUnusable`` for a broken one."""
        value = json_object(body)
        if value is None:
            refuse_half(body)
            return body
        content = value.get("content")
        for index, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict):
                self._block(index, block, is_whole=True)
        self._name(value)
        self._stop(value)
        self.seen.usage = _mapping(value.get("usage"))
        if self._model is None or "model" not in value:
            return body
        return renamed(body, self._model)

    def closing(self) -> bytes:
        """Return ``message_stop``."""
        return named_event("message_stop", b'{"type":"message_stop"}')

    def failure(self, error_body: bytes) -> bytes:
        """Return an error event."""
        return error_event(error_body)

    def usage(self) -> UsageReading | None:
        """Return the engine's counts, of start and end together."""
        self.seen.served_in(self._start_usage)
        self.seen.served_in(self.seen.usage)
        if self._start_usage is None and self.seen.usage is None:
            return None
        return anthropic_stream_usage(self._start_usage, self.seen.usage)

    def _block(self, index: int, block: Json, *, is_whole: bool) -> bool:
        kind = block.get("type")
        if kind == "text":
            self.seen.take(0, {"content": block.get("text")})
            return bool(block.get("text"))
        if kind != "tool_use":
            return False
        given = block.get("input")
        arguments = arguments_text(given) if is_whole or (given and isinstance(given, dict)) else ""
        function = {"name": block.get("name"), "arguments": arguments}
        self.seen.take(0, {"tool_calls": [{"index": index, "id": block.get("id"), "function": function}]})
        return True

    def _delta(self, index: int, delta: Json) -> bool:
        kind = delta.get("type")
        if kind == "text_delta":
            self.seen.take(0, {"content": delta.get("text")})
            return bool(delta.get("text"))
        if kind == "input_json_delta":
            arguments = delta.get("partial_json")
            self.seen.take(0, {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
            return bool(arguments)
        return kind == "thinking_delta" and bool(delta.get("thinking"))

    def _count(self, told: Json) -> None:
        """Take a delta's counts, which are totals: one that a later delta leaves out is what it was."""
        self.seen.usage = {**(self.seen.usage or {}), **{name: n for name, n in told.items() if n is not None}} or None

    def _name(self, message: Json) -> None:
        if isinstance(identity := message.get("id"), str):
            self.seen.response_id = identity

    def _stop(self, told: Json) -> None:
        if isinstance(reason := told.get("stop_reason"), str) and reason:
            self.seen.stop(_REASONS.get(reason, reason))

    def _renamed_start(self, event: bytes, data: bytes, message: Json) -> bytes:
        if self._model is None or "model" not in message:
            return event
        return renamed_in(event, data, "message", self._model)


def _mapping(value: object) -> Json | None:
    return value if isinstance(value, dict) else None


def _index(value: Json) -> int:
    index = value.get("index")
    return index if isinstance(index, int) else 0
