"""A conversation and what is asked of it, as the gateway itself writes it: the one form between all protocols.

Each inbound protocol reads its requests into a ``Dialog``; ``chat_request`` writes a ``Dialog`` as the chat completion
that engines take. Whatever a protocol can say and a ``Dialog`` cannot is refused by name where it is read, so that
nothing is lost on the way without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.errors import BadRequest

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Text:
    """Words."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture: a ``data:`` URL, or where to fetch it."""

    url: str
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A document: a ``data:`` URL with its content."""

    data: str
    name: str | None = None


Part = Text | Image | File


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: ``arguments`` is JSON text as the model wrote it, or as near as the client gives it back."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """What the system, a developer or the user says."""

    role: Literal["system", "developer", "user"]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn of the model: what it thought, said and asked for."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool call came to."""

    call_id: str
    parts: tuple[Part, ...]


Turn = Said | Answered | Result


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    parameters: Json | None
    description: str | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether tools may or must be called, and which."""

    mode: Literal["auto", "none", "required", "named"]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """The answer's form: any JSON object, or one that a schema describes."""

    schema: Json | None = None
    name: str = "answer"
    strict: bool | None = None
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Dialog:
    """A whole request. ``extras`` are members that no protocol here knows: engines' own, passed on as they are."""

    model: str
    turns: tuple[Turn, ...]
    stream: bool = False
    tools: tuple[Tool, ...] = ()
    choice: Choice | None = None
    is_parallel: bool | None = None  # several calls in one answer
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    format: Format | None = None
    effort: str | None = None
    user: str | None = None
    sampling: Json = field(default_factory=dict)  # temperature, top_p, top_k, top_logprobs …
    extras: Json = field(default_factory=dict)


def joined(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Return the turns with neighbouring pieces of one answer made one, as engines write and templates read them."""
    out: list[Turn] = []
    for turn in turns:
        last = out[-1] if out else None
        if isinstance(turn, Answered) and isinstance(last, Answered):
            out[-1] = Answered(last.text + turn.text, last.reasoning + turn.reasoning, last.calls + turn.calls)
        else:
            out.append(turn)
    return tuple(out)


def arguments_text(value: object) -> str:
    """Return a call's arguments, given as a JSON value, as JSON text."""
    return json.dumps(value, ensure_ascii=False)


class Reading:
    """Reads members of one object of a request, and says where something is wrong.

    ``where`` is the object's path in the request, for messages and for ``param``.
    """

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self.values, self._where = values, where

    def path(self, name: str) -> str:
        """Return a member's path."""
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, what: str) -> BadRequest:
        """Return the error for a member of the wrong kind."""
        return BadRequest(f"{self.path(name)}: {what}", param=self.path(name))

    def refused(self, name: str, what: str | None = None) -> BadRequest:
        """Return the error for what cannot be translated."""
        told = what or f"engines behind this gateway cannot be asked for {name!r}"
        return BadRequest(f"{self.path(name)}: {told}", param=self.path(name), code="not_supported")

    def text(self, name: str) -> str:
        """Return a string that must be there."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "must be a string")
        return value

    def maybe_text(self, name: str) -> str | None:
        """Return a string, or ``None`` where there is none."""
        return None if self.values.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool | None:
        """Return a boolean, or ``None`` where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def count(self, name: str, least: int = 1) -> int | None:
        """Return a whole number of at least ``least``, or ``None`` where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"must be a whole number of at least {least}")
        return value

    def number(self, name: str) -> float | None:
        """Return a number, or ``None`` where there is none."""
        value = self.values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.wrong(name, "must be a number")
        return value

    def object(self, name: str) -> Reading | None:
        """Return an object, or ``None`` where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "must be an object")
        return Reading(value, self.path(name))

    def objects(self, name: str) -> Sequence[Reading]:
        """Return a list of objects, empty where there is none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong(name, "must be a list")
        found = []
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                raise self.wrong(f"{name}[{index}]", "must be an object")
            found.append(Reading(item, self.path(f"{name}[{index}]")))
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, empty where there is none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "must be a list of strings")
        return tuple(value)
