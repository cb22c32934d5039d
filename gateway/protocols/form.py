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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # public in the library, missing in its stubs
from typing import Any, TypeVar

import msgspec

_SPACE = re.compile(r"[ \t\n\r]*")
_KEEP = object()
_Read = TypeVar("_Read")
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


class Member(msgspec.Struct, frozen=True, gc=False):
    """One top-level member: ``start`` and ``end`` bound its value, ``key_start`` is the quote before its name."""

    name: str
    value: object
    key_start: int
    start: int
    end: int


class Form:
    """One JSON object: its text from ``{`` at ``start`` to ``}`` before ``end``, its members, their values by name.

    ``ends`` bounds the elements of the array that was asked for: the end of each that was read now. Immutable.
    """

    __slots__ = ("_text", "end", "ends", "members", "start", "values")

    def __init__(
        self, text: str | bytes, start: int, end: int, members: Sequence[Member], ends: Sequence[int] = ()
    ) -> None:
        """``text`` may be given as it was sent; it is decoded when it is needed."""
        self._text, self.start, self.end, self.ends = text, start, end, ends
        self.members = tuple(members)
        self.values: Mapping[str, object] = {member.name: member.value for member in members}

    @property
    def text(self) -> str:
        """The whole text in which the object stands."""
        if isinstance(self._text, bytes):
            self._text = self._text.decode()
        return self._text

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


class Opening(msgspec.Struct, frozen=True):
    """How an object's text begins that was read before: up to the end of an element of one of its arrays."""

    object_start: int
    members: tuple[Member, ...]
    """The members before the array."""
    name: str
    key_start: int
    start: int
    """Where the array's name and value stand."""
    items: Sequence[object]
    """The elements up to here."""
    chars: int
    length: int
    """How many characters, and bytes, that is."""


def scan(body: bytes, grows: str | None = None) -> Form:
    """Read a body. Raises ``FormError`` for text that is not UTF-8, not JSON, or not an object.

    ``grows`` names the array whose elements' ends are wanted. It is stricter than ``json.loads`` in what nothing
    behind it could store or encode: half a surrogate pair, and more than ``MAX_DEPTH`` levels.
    """
    text = _decoded(body)
    form = scan_text(text, grows=grows)
    _refuse_odd(text, [member.name for member in form.members], [member.value for member in form.members])
    return form


def scan_on(body: bytes, opening: Opening) -> Form:
    """Do what ``scan`` does for a body that begins with ``opening``. O(what follows), and a copy of the items."""
    tail = _decoded(body, opening.length)
    scanner = _Scanner(tail, opening.chars, opening.name)
    items, known = list(opening.items), len(opening.items)

    def read() -> int:
        scanner.members += opening.members
        at = scanner.elements(items, 0, scanner.ends)
        scanner.members.append(Member(opening.name, items, opening.key_start, opening.start, at + opening.chars))
        return scanner.whole(scanner.rest(at))

    end = _saying_what(read, opening.chars)
    new = scanner.members[len(opening.members) + 1 :]
    _refuse_odd(tail, [member.name for member in new], [items[known:], *(member.value for member in new)])
    return Form(body, opening.object_start, end, scanner.members, scanner.ends)


def _decoded(body: bytes, start: int = 0) -> str:
    try:
        return body[start:].decode() if start else body.decode()
    except UnicodeDecodeError as error:
        raise FormError(f"the body is not UTF-8 (byte {start + error.start})") from None


def _refuse_odd(text: str, names: list[str], values: list[object]) -> None:
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(values):
        raise FormError("the body is nested too deeply")
    if _SURROGATE.search(text) is not None:
        _refuse_half_pairs([names, values])


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
    return Form("".join(pieces) + "}", 0, at + 1, members)


def scan_text(text: str, start: int = 0, *, whole: bool = True, grows: str | None = None) -> Form:
    """Read the object that begins at ``start``; with ``whole`` nothing but white space may stand after it.

    One pass; each value is decoded by C code, so that the cost is that of ``json.loads`` and a few µs a member.
    """
    scanner = _Scanner(text, 0, grows)

    def read() -> tuple[int, int]:
        first, end = scanner.whole_object(start)
        return first, scanner.whole(end) if whole else end

    first, end = _saying_what(read, 0)
    return Form(text, first, end, scanner.members, scanner.ends)


def _saying_what(read: Callable[[], _Read], shift: int) -> _Read:
    """Read, and say what is wrong as a ``FormError``."""
    try:
        return read()
    except StopIteration as stop:
        raise FormError(f"a value is expected at character {stop.value + shift}") from None
    except json.JSONDecodeError as error:
        raise FormError(f"{error.msg} at character {error.pos + shift}") from None
    except RecursionError:
        raise FormError("the body is nested too deeply") from None
    except FormError:
        raise
    except ValueError:  # int() refuses more than some thousands of digits
        raise FormError("a number has too many digits") from None


class _Scanner:
    """Reads one object's members, from a text that begins ``shift`` characters behind where places are counted from."""

    def __init__(self, text: str, shift: int, grows: str | None) -> None:
        self._text, self._shift, self._grows = text, shift, grows
        self.members: list[Member] = []
        self.ends: list[int] = []

    def whole_object(self, start: int) -> tuple[int, int]:
        """Read the object that begins at ``start``; return where it does, and its end."""
        text = self._text
        first = _skip(text, start)
        if text[first : first + 1] != "{":
            raise FormError("the body is not a JSON object")
        at = _skip(text, first + 1)
        if text[at : at + 1] == "}":
            return first, at + 1
        return first, self.rest(self._member(at))

    def rest(self, at: int) -> int:
        """Read on behind a member's value; return the object's end."""
        text = self._text
        while True:
            at = _skip(text, at)
            mark = text[at : at + 1]
            if mark == "}":
                return at + 1
            if mark != ",":
                raise FormError(f"',' or '}}' is expected at character {at + self._shift}")
            at = self._member(_skip(text, at + 1))

    def elements(self, items: list[object], at: int, ends: list[int] | None) -> int:
        """Read on behind an array's element; return the array's end."""
        text = self._text
        while True:
            at = _skip(text, at)
            mark = text[at : at + 1]
            if mark == "]":
                return at + 1
            if mark != ",":
                raise FormError(f"',' or ']' is expected at character {at + self._shift}")
            item, at = _scan_value(text, _skip(text, at + 1))
            items.append(item)
            if ends is not None:
                ends.append(at + self._shift)

    def whole(self, end: int) -> int:
        """Return ``end``, if nothing stands behind it."""
        if _skip(self._text, end) != len(self._text):
            raise FormError(f"there is more after the object, at character {end + self._shift}")
        return end + self._shift

    def _member(self, key_start: int) -> int:
        """Read one member; return its value's end."""
        text, shift = self._text, self._shift
        if text[key_start : key_start + 1] != '"':
            raise FormError(f"a member's name is expected at character {key_start + shift}")
        name, at = scanstring(text, key_start + 1, True)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise FormError(f"':' is expected at character {at + shift}")
        start = _skip(text, at + 1)
        is_array = text[start : start + 1] == "["
        if is_array and (name == self._grows or len(text) > LONG_CHARS):
            value, end = self._array(start, self.ends if name == self._grows else None)
        else:
            value, end = _scan_value(text, start)
        self.members.append(Member(name, value, key_start + shift, start + shift, end + shift))
        if len(self.members) > MAX_MEMBERS:
            raise FormError(f"the body has more than {MAX_MEMBERS} members")
        return end

    def _array(self, start: int, ends: list[int] | None) -> tuple[list[object], int]:
        """Do what ``_scan_value`` does for an array, one C call an element."""
        text = self._text
        at = _skip(text, start + 1)
        if text[at : at + 1] == "]":
            return [], at + 1
        item, at = _scan_value(text, at)
        items = [item]
        if ends is not None:
            ends.append(at + self._shift)
        return items, self.elements(items, at, ends)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
