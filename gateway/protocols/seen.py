"""What is remembered of an answer while it goes by, whatever protocol it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_adapter.base import UsageParts
from gateway.protocols.deltas import begins_another, finish_reason_of, told_arguments, told_calls, told_parts
from tracing.record import ToolCall

MAX_REMEMBERED_CHARS = 1 << 20
"""An answer longer than this isn't remembered for linking the request that will quote it."""

MAX_CALLS = 256


@dataclass(slots=True)
class _Call:
    """A tool call as its pieces came."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """What was seen of an answer so far."""

    usage: Mapping[str, object] | None = None
    extension: Mapping[str, object] | None = None
    choices: int = 1  # that were asked for
    pieces: int = 0  # of a stream: events that brought output
    finish_reason: str | None = None
    is_done: bool = False
    may_call: bool = False  # tools were given; many engines hold a call back until they have all of it
    is_shown: bool = False  # its end went to the client, or all but that: its finish reason, and the count is here
    error: str | None = None  # an error event's class
    error_body: bytes | None = None  # the engine's own words, which the client has not got
    head: Mapping[str, object] | None = None  # id and time of a chat's or completion's stream, as the client has them
    output_ids: Sequence[int] | None = None  # where the engine was asked for them, and tells them
    stop_text: str | None = None  # the words at which the model was to stop; it said them, and they are not shown
    service_tier: str | None = None  # the one that a vendor says it was answered in, and bills by
    response_id: str | None = None  # by which a later request may continue this answer
    is_all: bool = True  # that the reader remembers: an event like the last one but for its text needs no reader
    texts: int = 0  # that were remembered, of text, reasoning and arguments: each one a string of the answer's JSON
    _grew: list[str] = field(default_factory=list)  # where the last of them is
    _ended: dict[int, bool] = field(default_factory=dict)  # whether a choice that began has said how it ended
    _calls: dict[tuple[int, int, int], _Call] = field(default_factory=dict)  # by choice, index and coming
    _growing: dict[tuple[int, int], _Call] = field(default_factory=dict)  # that further pieces belong to
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _remembered_chars: int = 0
    _is_whole: bool = True  # all of the first choice's message is remembered, and there is no other choice

    def served_in(self, told: Mapping[str, object] | None) -> None:
        """Take the service tier from where an API tells it: the answer, or its usage."""
        if told is not None and isinstance(tier := told.get("service_tier"), str):
            self.service_tier = tier

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the model asked for, in order."""
        return tuple(ToolCall(id=call.id, name=call.name) for _, call in sorted(self._calls.items()) if call.name)

    def message(self) -> Mapping[str, object] | None:
        """Return the assistant's message as a client would send it back; ``None`` where it isn't known whole."""
        if not self._is_whole or self.finish_reason is None:
            return None
        message: dict[str, object] = {"role": "assistant", "content": "".join(self._text)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": "".join(c.arguments)}}
                for _, c in sorted(self._calls.items())
            ]
        return message

    def count(self, parts: UsageParts | None) -> None:
        """Add what an answer, or a chunk of one, says of its tokens."""
        if parts is not None:
            self.usage = parts.usage or self.usage
            self.extension = parts.extension or self.extension
            self.output_ids = parts.output_ids or self.output_ids

    def finish(self, choice: Mapping[str, object]) -> None:
        """Add how a choice ended, if it has."""
        index = choice.get("index")
        number = index if isinstance(index, int) else 0
        if (reason := finish_reason_of(choice)) is None:
            self._ended.setdefault(number, False)
        else:
            self.stop(reason, number)
            matched = choice.get("matched_stop", choice.get("stop_reason"))  # SGLang's and vLLM's word for it
            self.stop_text = matched if isinstance(matched, str) else None

    def stop(self, reason: str, choice: int = 0) -> None:
        """Note that a choice has ended, for this reason in chat completions' words."""
        self.finish_reason, self._ended[choice] = reason, True

    @property
    def is_answered(self) -> bool:
        """Whether every choice that was asked for, and any other that began, has said how it ended."""
        has_all = len(self._ended) >= self.choices and all(self._ended.values())
        return self.finish_reason is not None and has_all

    @property
    def text(self) -> str | None:
        """The text so far, or the completion's; ``None`` where it isn't known whole, or there are other choices."""
        return "".join(self._text) if self._is_whole else None

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def said(self) -> str:
        """Return all that was generated so far, as far as it is remembered: reasoning, text, calls."""
        calls = [word for call in self._calls.values() for word in (call.name, *call.arguments)]
        return "".join([*self._reasoning, *self._text, *calls])

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return bool(self._calls)

    def gave_up(self, error: str, body: bytes) -> None:
        """Note that the engine ended its answer with an error."""
        self.error, self.error_body = error, body

    def go_on(self) -> None:
        """Forget how an engine ended that another one takes over from."""
        self.error = self.error_body = self.finish_reason = self.stop_text = None
        self.is_done = False
        self._ended.clear()

    def count_anew(self) -> None:
        """Forget what an engine counted of its part of an answer: the one that goes on counts the whole."""
        self.usage = self.extension = None

    def take(self, choice: int, part: Mapping[str, object]) -> None:
        """Add a message, or a piece of one."""
        self._is_whole = self._is_whole and choice == 0
        content = part.get("content")
        if isinstance(content, str):
            if content:
                self._remember(self._text, content)
        elif content:
            for text, is_thought in told_parts(content):
                self._remember(self._reasoning if is_thought else self._text, text)
        if isinstance(thought := part.get("reasoning_content") or part.get("reasoning"), str):
            self._remember(self._reasoning, thought)
        for index, piece in told_calls(part):
            self._take_call(choice, index, piece)

    def take_text(self, choice: int, text: str) -> None:
        """Add a piece of a completion."""
        self._is_whole = self._is_whole and choice == 0
        self._remember(self._text, text)

    @property
    def last_text(self) -> str:
        """The text that was remembered last."""
        return self._grew[-1]

    def more(self, text: str) -> None:
        """Add an event that brought one text, and is the last one but for that."""
        self.pieces += 1
        self._remember(self._grew, text)

    def _take_call(self, choice: int, index: int, piece: Mapping[str, object]) -> None:
        call, function = self._growing.get((choice, index)), piece.get("function")
        if call is None or begins_another(call.id, call.name, piece):
            if len(self._calls) >= MAX_CALLS:
                self._is_whole = False
                return
            call = self._growing[choice, index] = self._calls[choice, index, len(self._calls)] = _Call()
        if isinstance(identity := piece.get("id"), str):
            call.id = call.id or identity
        if isinstance(function, dict):
            if isinstance(name := function.get("name"), str):
                call.name = call.name or name
            if (arguments := told_arguments(function)) is not None:
                self._remember(call.arguments, arguments)

    def _remember(self, pieces: list[str], text: str) -> None:
        self._remembered_chars += len(text)
        if self._remembered_chars <= MAX_REMEMBERED_CHARS:
            pieces.append(text)
            self.texts, self._grew = self.texts + 1, pieces
        else:
            self._is_whole = False
