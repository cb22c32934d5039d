"""Answers of engines that speak Responses themselves: followed, kept, and shown as they came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from billing.counts import UsageReading
from billing.usage import responses_usage
from gateway.protocols.decode import json_object, refuse_half
from gateway.protocols.model_name import renamed, renamed_in
from gateway.protocols.openai_errors import engine_words, error_class
from gateway.protocols.seen import Seen
from gateway.protocols.sse import data_of, named_event
from tracing.messages import item_role

Json = Mapping[str, object]

_OUTPUT = (
    "response.output_text.delta", "response.refusal.delta", "response.reasoning_text.delta",
    "response.reasoning_summary_text.delta", "response.function_call_arguments.delta",
    "response.custom_tool_call_input.delta",
)  # fmt: skip
_ENDS = ("response.completed", "response.incomplete", "response.failed")
"""No sets: an engine's event may have anything that JSON has for a type."""


class NativeResponseReader:
    """``AnswerReader`` over Responses. Changes nothing but the model's name, where the client knows it by another."""

    def __init__(self, keep: Callable[[dict[str, object]], None], model: str | None = None) -> None:
        """``keep`` is given a whole response before its end goes out; ``model``: the name to show."""
        self._keep, self._model = keep, model
        self._sequence = 0
        self._output: Sequence[object] = ()
        self.seen = Seen()

    def has_ended(self) -> bool:
        """Tell whether the response's last event was seen."""
        return self.seen.is_done

    def event(self, event: bytes) -> tuple[bytes, bool]:
        """Take one event; return it, and whether it brought output."""
        data = data_of(event)
        value = None if data is None else json_object(data)
        if value is None or data is None:
            return event, False
        kind = value.get("type")
        if isinstance(number := value.get("sequence_number"), int):
            self._sequence = number + 1
        has_output = kind in _OUTPUT and bool(value.get("delta"))
        self.seen.pieces += has_output
        if kind == "error":
            self.seen.error = error_class({"type": value.get("code")})
            self.seen.is_done = True
        response = value.get("response")
        if not isinstance(response, dict):
            return event, has_output
        if kind in _ENDS:
            self._take(response)
            self.seen.is_done = True
        return self._renamed(event, data, response), has_output

    def answer(self, body: bytes) -> bytes:
        """Take a whole response; return it. Raises ``UpstreamUnusable`` for a broken one."""
        value = json_object(body)
        if value is None:
            refuse_half(body)
            return body
        self._take(value)
        if self._model is None or "model" not in value:
            return body
        return renamed(body, self._model)

    def closing(self) -> bytes:
        """Return nothing: a response's last event is its end."""
        return b""

    def failure(self, error_body: bytes) -> bytes:
        """Return an error event."""
        words = engine_words(500, error_body)
        told = {"code": words.code or words.kind, "message": words.message, "param": words.param}
        event = {"type": "error", "sequence_number": self._sequence, **told}
        return named_event("error", msgspec.json.encode(event))

    def usage(self) -> UsageReading | None:
        """Return the engine's counts."""
        return None if self.seen.usage is None else responses_usage(self.seen.usage, self._output)

    def _take(self, response: dict[str, object]) -> None:
        seen = self.seen
        usage, output = response.get("usage"), response.get("output")
        seen.usage = usage if isinstance(usage, dict) else seen.usage
        seen.served_in(response)
        if response.get("status") not in ("completed", "incomplete"):
            seen.error = error_class(response.get("error"))
            return
        self._output = output if isinstance(output, list) else ()
        for index, item in enumerate(self._output):
            if isinstance(item, dict):
                self._item(index, item)
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        calls = "tool_calls" if seen.tool_calls else "stop"
        seen.stop({"max_output_tokens": "length", None: calls}.get(reason, str(reason)))
        if isinstance(identity := response.get("id"), str):
            seen.response_id = identity
            self._keep(response if self._model is None else response | {"model": self._model})

    def _item(self, index: int, item: Json) -> None:
        kind, call_id, content = item.get("type"), item.get("call_id"), item.get("content")
        if isinstance(call_id, str) and item_role(kind) == "assistant":  # a call of any tool that the client runs
            name = item.get("name") or str(kind).removesuffix("_call")
            function = {"name": name, "arguments": item.get("arguments", item.get("input"))}
            self.seen.take(0, {"tool_calls": [{"index": index, "id": call_id, "function": function}]})
        for part in content if kind == "message" and isinstance(content, list) else ():
            if isinstance(part, dict):
                self.seen.take(0, {"content": part.get("text", part.get("refusal"))})

    def _renamed(self, event: bytes, data: bytes, response: Json) -> bytes:
        if self._model is None or "model" not in response:
            return event
        return renamed_in(event, data, "response", self._model)
