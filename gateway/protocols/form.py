"""A JSON object's top-level members with their places in the text, so that one changes and no other byte does.

A gateway that parses and prints a body again reorders keys, changes escapes and loses what it doesn't know; each of
these costs an engine's prefix cache or a client's field. ``scan`` therefore reads every top-level value once, with the
C scanner of the standard library, and remembers where it stood; ``Form.edited`` replaces or appends named members in
the original text.

A name that occurs several times counts by its last value, as parsers mostly do, but an edit reaches every occurrence,
so that no parser that prefers the first can see something else than the gateway decided on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # public in the library, missing in its stubs
from typing import Any

import msgspec

_SPACE = re.compile(r"[ \t\n\r]*")
_KEEP = object()
_CONTAINERS = frozenset({dict, list})  # a parser's values are of no other kinds
MAX_MEMBERS = 4096
MAX_DEPTH = 128
"""Containers within a body, as many as serde_json allows: whatever walks a body later must not run out of stack."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LONG_CHARS = 1 << 18
"""In texts longer than this, arrays are read element by element, so that a thread that reads one lets others run."""


class FormError(ValueError):
    """The text is not one well-formed JSON object. The message names the place, never the content."""


def _refuse_constant(name: str) -> object:
    raise FormError(f"{name} is not JSON")


_scan_value = json.JSONDecoder(parse_constant=_refuse_constant).scan_once  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON text to be put in as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Member:
    """One top-level member: ``start`` and ``end`` bound its value, ``key_start`` is the quote before its name."""

    name: str
    value: object
    key_start: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Form:
    """One JSON object: its text from ``{`` at ``start`` to ``}`` before ``end``, its members, their values by name."""

    text: str
    start: int
    end: int
    members: tuple[Member, ...]
    values: Mapping[str, object]

    def edited(self, edits: Mapping[str, object], *, drop: frozenset[str] = frozenset()) -> str:
        """Return the object's text with each named member replaced, or appended where new, and ``drop`` taken out.

        Everything else stays as it was, white space included. O(text).
        """
        text, members = self.text, self.members
        pieces = [text[self.start : members[0].key_start if members else self.start + 1]]
        is_first, previous_end = True, 0
        for member in members:
            if member.name not in drop:
                pieces.append("" if is_first else text[previous_end : member.key_start])
                pieces.append(text[member.key_start : member.start])
                edit = edits.get(member.name, _KEEP)
                pieces.append(text[member.start : member.end] if edit is _KEEP else _printed(edit))
                is_first = False
            previous_end = member.end
        for name, value in edits.items():
            if name not in self.values and name not in drop:
                pieces.append(f"{'' if is_first else ','}{json.dumps(name)}:{_printed(value)}")
                is_first = False
        pieces.append(text[members[-1].end if members else self.start + 1 : self.end])
        return "".join(pieces)

    def nested(self, name: str) -> Form | None:
        """Return the member's own form when its (last) value is an object, else ``None``."""
        for member in reversed(self.members):
            if member.name == name:
                return scan_text(self.text, member.start, whole=False) if isinstance(member.value, dict) else None
        return None


def _printed(value: object) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, list) and value and type(value[0]) is int:
        return msgspec.json.encode(value).decode()  # token ids: a tenth of the time, during which no stream goes on
    return json.dumps(value, separators=(",", ":"))


def scan(body: bytes) -> Form:
    """Read a body. Raises ``FormError`` for text that is not UTF-8, not JSON, or not an object.

    It is stricter than ``json.loads`` in what nothing behind it could store or encode: half a surrogate pair, and more
    than ``MAX_DEPTH`` levels.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise FormError(f"the body is not UTF-8 (byte {error.start})") from None
    form = scan_text(text)
    values = [member.value for member in form.members]
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(values):
        raise FormError("the body is nested too deeply")
    if _SURROGATE.search(text) is not None:
        _refuse_half_pairs([[member.name for member in form.members], values])
    return form


def _is_deep(values: list[object]) -> bool:
    level: list[Any] = [value for value in values if type(value) in _CONTAINERS]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            value
            for outer in level
            for value in (outer.values() if isinstance(outer, dict) else outer)
            if type(value) in _CONTAINERS
        ]
    return bool(level)


def _refuse_half_pairs(values: object) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FormError("an escape is half of a surrogate pair") from None


def form_of(values: Mapping[str, object]) -> Form:
    """Return an object of our own with its members' places, in the order given."""
    pieces, members, at = ["{"], list[Member](), 1
    for name, value in values.items():
        mark, key, printed = "," if members else "", json.dumps(name), json.dumps(value, ensure_ascii=False)
        start = at + len(mark) + len(key) + 1
        members.append(Member(name, value, at + len(mark), start, start + len(printed)))
        pieces.append(f"{mark}{key}:{printed}")
        at = start + len(printed)
    return Form("".join(pieces) + "}", 0, at + 1, tuple(members), dict(values))


def scan_text(text: str, start: int = 0, *, whole: bool = True) -> Form:
    """Read the object that begins at ``start``; with ``whole`` nothing but white space may stand after it.

    One pass; each value is decoded by C code, so that the cost is that of ``json.loads`` and a few µs a member.
    """
    try:
        return _scan_object(text, start, whole)
    except StopIteration as stop:
        raise FormError(f"a value is expected at character {stop.value}") from None
    except json.JSONDecodeError as error:
        raise FormError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise FormError("the body is nested too deeply") from None
    except FormError:
        raise
    except ValueError:  # int() refuses more than some thousands of digits
        raise FormError("a number has too many digits") from None


def _scan_object(text: str, start: int, whole: bool) -> Form:
    at = _skip(text, start)
    if text[at : at + 1] != "{":
        raise FormError("the body is not a JSON object")
    first, members = at, list[Member]()
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return _finish(text, first, at + 1, members, whole)
    while True:
        key_start = at
        if text[at : at + 1] != '"':
            raise FormError(f"a member's name is expected at character {at}")
        name, at = scanstring(text, at + 1, True)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise FormError(f"':' is expected at character {at}")
        value_start = _skip(text, at + 1)
        is_long_array = len(text) > LONG_CHARS and text[value_start : value_start + 1] == "["
        value, value_end = _scan_array(text, value_start) if is_long_array else _scan_value(text, value_start)
        members.append(Member(name, value, key_start, value_start, value_end))
        if len(members) > MAX_MEMBERS:
            raise FormError(f"the body has more than {MAX_MEMBERS} members")
        at = _skip(text, value_end)
        mark = text[at : at + 1]
        if mark == "}":
            return _finish(text, first, at + 1, members, whole)
        if mark != ",":
            raise FormError(f"',' or '}}' is expected at character {at}")
        at = _skip(text, at + 1)


def _scan_array(text: str, start: int) -> tuple[list[object], int]:
    """Do what ``_scan_value`` does for an array, one C call an element."""
    items = list[object]()
    at = _skip(text, start + 1)
    if text[at : at + 1] == "]":
        return items, at + 1
    while True:
        item, at = _scan_value(text, at)
        items.append(item)
        at = _skip(text, at)
        mark = text[at : at + 1]
        if mark == "]":
            return items, at + 1
        if mark != ",":
            raise FormError(f"',' or ']' is expected at character {at}")
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _finish(text: str, start: int, end: int, members: list[Member], whole: bool) -> Form:
    if whole and _skip(text, end) != len(text):
        raise FormError(f"there is more after the object, at character {end}")
    return Form(text, start, end, tuple(members), {member.name: member.value for member in members})
