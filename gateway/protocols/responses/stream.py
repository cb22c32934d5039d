"""A Responses answer, written: as a stream of numbered events or as one body; kept where the client wants that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gateway.protocols.answer import AnswerEvent, Block, Closed, Grew, Kind, Opened
from gateway.protocols.openai_errors import engine_words
from gateway.protocols.responses.answer import Echo, Json, finished, item, opened_item, part, response
from gateway.protocols.responses.custom_tools import CUSTOM_CALL
from gateway.protocols.sse import named_event
from gateway.protocols.translated import Finish
from tracing.record import Usage

_GREW = {
    Kind.TEXT: "response.output_text.delta",
    Kind.REFUSAL: "response.refusal.delta",
    Kind.REASONING: "response.reasoning_text.delta",
    Kind.CALL: "response.function_call_arguments.delta",
}
_DONE = {
    Kind.TEXT: ("response.output_text.done", "text"),
    Kind.REFUSAL: ("response.refusal.done", "refusal"),
    Kind.REASONING: ("response.reasoning_text.done", "text"),
    Kind.CALL: ("response.function_call_arguments.done", "arguments"),
}


class ResponseWriter:
    """``AnswerWriter`` for Responses. ``keep`` is given the whole response before its last event goes out."""

    def __init__(self, echo: Echo, keep: Callable[[Json], None]) -> None:
        self._echo, self._keep = echo, keep
        self._sequence = 0
        self._index = -1  # of the item that is open
        self._is_custom = False
        self._has_begun = False

    def begin(self) -> bytes:
        """Return ``response.created`` and ``response.in_progress``."""
        self._has_begun = True
        begun: Json = {"response": response(self._echo, "in_progress")}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """Return the items' events."""
        return b"".join(self._item_event(event) for event in events)

    def end(self, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> bytes:
        """Return ``response.completed`` or ``response.incomplete``, with the whole response."""
        whole = finished(self._echo, blocks, finish, usage)
        self._keep(whole)
        return self._event(f"response.{whole['status']}", {"response": whole})

    def failure(self, error_body: bytes) -> bytes:
        """Return ``error`` and ``response.failed``, of a response that has begun: clients know no other."""
        out = b"" if self._has_begun else self.begin()
        words = engine_words(500, error_body)
        out += self._event("error", {"code": words.code or words.kind, "message": words.message, "param": words.param})
        failed = response(self._echo, "failed", error={"code": "server_error", "message": words.message})
        return out + self._event("response.failed", {"response": failed})

    def whole(self, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> bytes:
        """Return the response."""
        whole = finished(self._echo, blocks, finish, usage)
        self._keep(whole)
        return msgspec.json.encode(whole)

    def _item_event(self, event: AnswerEvent) -> bytes:
        block = event.block
        if isinstance(event, Opened):
            self._index += 1
            begun = opened_item(self._echo, block, self._index)
            self._is_custom = begun["type"] == CUSTOM_CALL
            added = self._event("response.output_item.added", self._at(item=begun))
            if block.kind is Kind.CALL:
                return added
            return added + self._event(
                "response.content_part.added", self._in_part(block, part=part(block, is_empty=True))
            )
        if isinstance(event, Grew):
            if self._is_custom:
                return b""  # its input is inside of what grows, and is told when that is whole
            members = self._in_part(block, delta=event.text)
            if block.kind is Kind.TEXT:
                members["logprobs"] = list(event.logprobs)
            return self._event(_GREW[block.kind], members)
        assert isinstance(event, Closed)
        return self._closed(block)

    def _closed(self, block: Block) -> bytes:
        whole = item(self._echo, block, self._index)
        told = self._input(block, whole) if self._is_custom else self._ended(block, whole)
        return told + self._event("response.output_item.done", self._at(item=whole))

    def _input(self, block: Block, whole: Json) -> bytes:
        given, name = whole["input"], f"response.{CUSTOM_CALL}_input"
        grew = self._event(f"{name}.delta", self._in_part(block, delta=given))
        return grew + self._event(f"{name}.done", self._in_part(block, input=given))

    def _ended(self, block: Block, whole: Json) -> bytes:
        name, member = _DONE[block.kind]
        members = self._in_part(block, **{member: block.text})
        if block.kind is Kind.TEXT:
            members["logprobs"] = block.logprobs
        if block.kind is Kind.CALL:
            members["name"] = whole["name"]
        out = self._event(name, members)
        if block.kind is not Kind.CALL:
            out += self._event("response.content_part.done", self._in_part(block, part=part(block)))
        return out

    def _at(self, **members: object) -> Json:
        return {"output_index": self._index, **members}

    def _in_part(self, block: Block, **members: object) -> Json:
        place = {} if block.kind is Kind.CALL else {"content_index": 0}
        return self._at(item_id=self._echo.item_id(block, self._index), **place, **members)

    def _event(self, name: str, members: Json) -> bytes:
        data = msgspec.json.encode({"type": name, "sequence_number": self._sequence, **members})
        self._sequence += 1
        return named_event(name, data)
