"""Tool calls in the text of an answer: the form in which models write them, and its parsing while it streams.

The form is Hermes', which the ``chatml-tools`` template shows the model and writes back::

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

Two parsers share one interface. ``ForcedCalls`` reads the output of a grammar, which is well-formed up to where it was
cut short: it tells a call's name as soon as it is known and its arguments as they grow. ``FreeCalls`` reads what a
model wrote as it liked: a call is told when it is complete and valid, anything else stays content. Both hand out
arguments exactly as they were written, so that an answer sent back renders to the tokens that were generated.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine_adapter.embedded.detokenize import overlap

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
CALL_SEPARATOR = "\n"
MAX_CALL_CHARS = 1 << 20  # a free call longer than this stays content


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer outside any call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The ``index``-th call of this answer; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, a string of JSON."""

    index: int
    text: str


AnswerPart = ContentText | CallStarted | CallArguments


class AnswerParser(Protocol):
    """Turns an answer's text into its parts."""

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that this text made certain."""

    def finish(self) -> list[AnswerPart]:
        """Return what was held back; the answer is over."""

    @property
    def calls(self) -> int:
        """How many calls were told so far."""


def call_opening(name: str) -> str:
    """Return the text of a call up to its arguments."""
    return f'{CALL_START}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def call_closing() -> str:
    """Return the text behind a call's arguments. It can't occur in them: JSON escapes a newline in a string."""
    return f"}}\n{CALL_END}"


def new_call_id() -> str:
    """Return a fresh id, unique across processes."""
    return f"call_{secrets.token_hex(12)}"


class PlainText:
    """No tools were offered: everything is content."""

    calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the text."""
        return [ContentText(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        """Return nothing: nothing is ever held back."""
        return []


class ForcedCalls:
    """Reads the output of ``tool_grammar``, which may end anywhere."""

    _HEAD = re.compile(r'\s*<tool_call>\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._text = ""
        self._inside = False
        self.calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """Return names and pieces of arguments as they become certain."""
        self._text += text
        parts: list[AnswerPart] = []
        while True:
            if not self._inside:
                head = self._HEAD.match(self._text)
                if head is None:
                    return parts
                self._text = self._text[head.end() :]
                self._inside = True
                self.calls += 1
                parts.append(CallStarted(self.calls - 1, self._new_id(), json.loads(head[1])))
            arguments, closing, rest = self._text.partition(call_closing())
            if not closing:
                keep = overlap(self._text, call_closing())
                parts += self._arguments(self._text[: len(self._text) - keep])
                self._text = self._text[len(self._text) - keep :]
                return parts
            parts += self._arguments(arguments)
            self._text, self._inside = rest, False

    def finish(self) -> list[AnswerPart]:
        """Return the rest of arguments that were cut short."""
        held, self._text = self._text, ""
        return self._arguments(held) if self._inside else []

    def _arguments(self, text: str) -> list[AnswerPart]:
        return [CallArguments(self.calls - 1, text)] if text else []


class FreeCalls:
    """Reads an answer in which the model may or may not call one of ``names``."""

    def __init__(self, names: frozenset[str], new_id: Callable[[], str] = new_call_id) -> None:
        self._names, self._new_id = names, new_id
        self._text = ""
        self.calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """Return content at once, calls when they are complete."""
        self._text += text
        parts: list[AnswerPart] = []
        while True:
            start = self._text.find(CALL_START)
            if start < 0:
                keep = overlap(self._text, CALL_START)
                parts += self._content(len(self._text) - keep)
                return parts
            # White space before a call belongs to the call's form; it is given back if there is no call after all.
            parts += self._content(len(self._text[:start].rstrip()))
            end = self._text.find(CALL_END)
            if end < 0:
                if len(self._text) > MAX_CALL_CHARS:
                    parts += self._content(len(self._text))
                return parts
            end += len(CALL_END)
            call = self._parse(self._text[:end])
            if call:
                parts += call
                self._text = self._text[end:]
            else:
                parts += self._content(end)

    def finish(self) -> list[AnswerPart]:
        """Return a call that was never finished as content; white space behind a call is dropped."""
        if self.calls and self._text.isspace():
            self._text = ""
        return self._content(len(self._text))

    def _content(self, length: int) -> list[AnswerPart]:
        text, self._text = self._text[:length], self._text[length:]
        if self.calls and text.isspace():
            return []
        return [ContentText(text)] if text else []

    def _parse(self, text: str) -> list[AnswerPart]:
        body = text.strip()[len(CALL_START) : -len(CALL_END)].strip()
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return []
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return []
        index, self.calls = self.calls, self.calls + 1
        written = text.strip().removeprefix(call_opening(call["name"])).removesuffix(call_closing())
        as_written = written if _same_json(written, arguments) else json.dumps(arguments, ensure_ascii=False)
        return [CallStarted(index, self._new_id(), call["name"]), CallArguments(index, as_written)]


def _same_json(text: str, value: object) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False
