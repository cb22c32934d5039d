"""An answer that an engine gives as a chat completion and a client gets in another protocol.

The reader is the same for all of them: it follows chunks or a whole completion, keeps what the record needs, and hands
blocks, finish and counts to the protocol's ``AnswerWriter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from billing.counts import UsageReading
from engine_adapter.base import EngineAdapter
from gateway.errors import UpstreamUnusable
from gateway.protocols.answer import AnswerBlocks, AnswerEvent, Block
from gateway.protocols.counting import reading_of
from gateway.protocols.decode import json_object
from gateway.protocols.deltas import finish_reason_of
from gateway.protocols.openai_errors import GAVE_UP, GAVE_UP_BODY, GAVE_UP_REASONS, error_class
from gateway.protocols.seen import Seen
from gateway.protocols.sse import data_of
from tracing.record import Usage

Json = Mapping[str, object]

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended: the engine's reason (``stop``, ``length``, ``tool_calls`` …), and the stop text it met."""

    reason: str | None
    matched_stop: str | None = None


class AnswerWriter(Protocol):
    """Writes one answer in a client's protocol: either ``whole``, or ``begin``, ``write`` …, ``end`` or ``failure``."""

    def begin(self) -> bytes:
        """Return the events that open a stream."""

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """Return the events for what came."""

    def end(self, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> bytes:
        """Return the events that end a stream whose answer is whole."""

    def failure(self, error_body: bytes) -> bytes:
        """Return the events that end a stream which failed."""

    def whole(self, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> bytes:
        """Return a whole answer's body."""


class TranslatedReader:
    """``AnswerReader`` over chat completions."""

    def __init__(self, adapter: EngineAdapter, writer: AnswerWriter) -> None:
        self._adapter, self._writer = adapter, writer
        self._blocks = AnswerBlocks()
        self._has_begun = False
        self.seen = Seen(is_all=False)

    def has_ended(self) -> bool:
        """Tell whether the client got the end."""
        return self.seen.is_done

    def event(self, event: bytes) -> tuple[bytes, bool]:
        """Take one event; return what the client gets for it, and whether it brought output."""
        data = data_of(event)
        if data is None:
            return event, False  # a comment is one in every protocol
        if data.strip() == _DONE:
            return (self.closing() if self.seen.finish_reason is not None else b""), False
        chunk = json_object(data)
        if chunk is None:
            return b"", False
        if "error" in chunk and "choices" not in chunk:
            self.seen.gave_up(error_class(chunk["error"]), data)
            return b"", False
        self._count(chunk)
        if _gave_up(chunk):
            self.seen.gave_up(GAVE_UP.code, GAVE_UP_BODY)
            return b"", False
        out = b"" if self._has_begun else self._begin()
        events = self._take(chunk, "delta")
        out += self._writer.write(events) if events else b""
        self.seen.pieces += bool(events)
        return out, bool(events)

    def answer(self, body: bytes) -> bytes:
        """Take a whole completion; return the client's answer. Raises ``UpstreamUnusable``."""
        answer = json_object(body)
        if answer is None or not answer.get("choices"):
            raise UpstreamUnusable("the engine's answer is no chat completion")
        self._count(answer)
        if _gave_up(answer):
            raise UpstreamUnusable(GAVE_UP.message, code=GAVE_UP.code)
        self._take(answer, "message")
        self._close()
        return self._writer.whole(self._blocks.blocks, self._finish(), self._usage())

    def closing(self) -> bytes:
        """Return the end of the client's stream; nothing where it has it already."""
        if self.seen.is_done:
            return b""
        self.seen.is_done = True
        out = b"" if self._has_begun else self._begin()
        if events := self._close():
            out += self._writer.write(events)
        return out + self._writer.end(self._blocks.blocks, self._finish(), self._usage())

    def failure(self, error_body: bytes) -> bytes:
        """Return the end of a stream that failed."""
        return self._writer.failure(error_body)

    def usage(self) -> UsageReading | None:
        """Return the engine's counts."""
        seen = self.seen
        return reading_of(self._adapter, seen.usage, seen.extension)

    def _begin(self) -> bytes:
        self._has_begun = True
        return self._writer.begin()

    def _count(self, answer: Json) -> None:
        self.seen.count(self._adapter.read_usage(answer))

    def _take(self, answer: Json, part_name: str) -> list[AnswerEvent]:
        choice = _first_choice(answer)
        if choice is None:
            return []
        self.seen.finish(choice)
        part = choice.get(part_name)
        if not isinstance(part, dict):
            return []
        self.seen.take(0, part)
        return self._blocks.take(part, _logprobs(choice))

    def _close(self) -> Sequence[AnswerEvent]:
        return self._blocks.finish(is_cut=self.seen.finish_reason == "length")

    def _finish(self) -> Finish:
        return Finish(self.seen.finish_reason, self.seen.stop_text)

    def _usage(self) -> Usage | None:
        reading = self.usage()
        return None if reading is None else reading.usage


def _gave_up(answer: Json) -> bool:
    """Tell whether the engine ended the answer for a reason of its own, which no protocol has a stop reason for."""
    first = _first_choice(answer)
    return first is not None and finish_reason_of(first) in GAVE_UP_REASONS


def _first_choice(answer: Json) -> Json | None:
    """Return what came of the first choice. These protocols know no other, but engines can be asked for several by a
    member of their own, which is passed on."""
    choices = answer.get("choices")
    listed = choices if isinstance(choices, list) else ()
    return next((choice for choice in listed if isinstance(choice, dict) and not choice.get("index")), None)


def _logprobs(choice: Json) -> Sequence[Json]:
    told = choice.get("logprobs")
    content = told.get("content") if isinstance(told, dict) else None
    return [item for item in content if isinstance(item, dict)] if isinstance(content, list) else ()
