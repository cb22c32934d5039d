"""An answer as the gateway itself writes it: blocks one after another, a finish, and counts.

``AnswerBlocks`` turns what engines stream (deltas of text, reasoning and calls, in any order) into blocks of which only
one is open at a time, since the protocols that clients speak allow no other. A call whose pieces come while another is
still open waits until that one's arguments are whole JSON, or until the end: nothing is lost, and nothing is mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import uuid4

import msgspec

from gateway.protocols.deltas import begins_another, told_arguments, told_calls, told_parts

Json = Mapping[str, object]


class Kind(StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    REFUSAL = "refusal"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Block:
    """One piece of an answer. ``pieces`` are its text, for a call the arguments' JSON."""

    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    """The open block grew by this text."""

    block: Block
    text: str
    logprobs: Sequence[Json] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """The open block is whole."""

    block: Block


AnswerEvent = Opened | Grew | Closed

_TEXTS = (("reasoning_content", Kind.REASONING), ("reasoning", Kind.REASONING), ("content", Kind.TEXT),
          ("refusal", Kind.REFUSAL))  # fmt: skip

_NO_ARGUMENTS = "{}"


class AnswerBlocks:
    """Folds the deltas of a chat completion's first choice into blocks. Whole messages are one delta."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []  # in the order in which they were opened
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        self._waiting: list[Block] = []  # calls that came while another was open, with the pieces that they got

    def take(self, delta: Json, logprobs: Sequence[Json] = ()) -> list[AnswerEvent]:
        """Add a delta; return what that does. O(delta), but for a call's arguments when the next call begins."""
        events: list[AnswerEvent] = []
        taken = set[Kind]()
        for name, kind in _TEXTS:
            text = delta.get(name)
            if isinstance(text, str) and text and kind not in taken:
                taken.add(kind)
                events += self._text(kind, text, logprobs if kind is Kind.TEXT else ())
        for text, is_thought in told_parts(delta.get("content")):
            events += self._text(Kind.REASONING if is_thought else Kind.TEXT, text, ())
        for index, piece in told_calls(delta):
            events += self._call(index, piece)
        return events

    def finish(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        """Return what closes everything that is open or waits. ``is_cut``: the answer met its limit in there."""
        events = self._close(is_cut=is_cut)
        for block in self._waiting:
            events += self._emit(block)
            events += self._close(is_cut=is_cut)
        self._waiting.clear()
        return events

    def _text(self, kind: Kind, text: str, logprobs: Sequence[Json]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if self._open is None or self._open.kind is not kind:
            events += self.finish()
            events += self._emit(Block(kind))
        assert self._open is not None
        self._open.pieces.append(text)
        self._open.logprobs.extend(logprobs)
        return [*events, Grew(self._open, text, logprobs)]

    def _call(self, index: int, piece: Json) -> list[AnswerEvent]:
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        block = self._calls.get(index)
        if block is None or begins_another(block.call_id, block.name, piece):
            block = self._calls[index] = Block(Kind.CALL)
            self._waiting.append(block)
        block.call_id, block.name = block.call_id or _text_of(piece, "id"), block.name or _text_of(function, "name")
        events: list[AnswerEvent] = []
        arguments = told_arguments(function)
        if arguments and (block.pieces or not arguments.isspace()):  # clients read what there is at each piece as JSON
            block.pieces.append(arguments)
            if block is self._open:
                events.append(Grew(block, arguments))
        while self._waiting and self._waiting[0].name and not self._is_busy():
            events += self._close()
            events += self._emit(self._waiting.pop(0))
        return events

    def _is_busy(self) -> bool:
        """Tell whether the open block may still grow while another is due: a call whose arguments are not whole."""
        return self._open is not None and self._open.kind is Kind.CALL and not _is_json(self._open.text)

    def _emit(self, block: Block) -> list[AnswerEvent]:
        if block.kind is Kind.CALL and not block.call_id:  # some engines leave it out; clients answer a call by it
            block.call_id = f"call_{uuid4().hex}"
        self._open = block
        self.blocks.append(block)
        return [Opened(block), *([Grew(block, block.text)] if block.pieces else [])]

    def _close(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        if self._open is None:
            return []
        block, self._open = self._open, None
        if block.kind is Kind.CALL and not is_cut and not block.pieces:  # clients read no text as JSON
            block.pieces.append(_NO_ARGUMENTS)
            return [Grew(block, _NO_ARGUMENTS), Closed(block)]
        return [Closed(block)]


def _text_of(value: Json, name: str) -> str:
    text = value.get(name)
    return text if isinstance(text, str) else ""


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
