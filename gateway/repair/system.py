"""The system prompt of a body, as the JSON strings in which it stands, line by line and with their escapes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.protocols.form import Form
from gateway.repair.splice import Place, Splice, elements, first_object, members, place_of, spliced

_ESCAPE = re.compile(r"\\.")
_SYSTEM_ROLES = ("system", "developer")  # held against whatever JSON has for a role


@dataclass(frozen=True, slots=True)
class _Content:
    """One member that holds (a part of) the system prompt: a string, or an array of parts."""

    place: Place
    parts: tuple[Place, ...]  # none where it is a string
    strings: tuple[tuple[int, Place], ...]  # which part, and where its text stands


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A system prompt. ``texts``: the lines of each of its strings, escapes as they are."""

    body: str
    contents: tuple[_Content, ...]
    texts: tuple[tuple[str, ...], ...]

    def rewritten(self, texts: Sequence[Sequence[str]]) -> list[Splice]:
        """Return what makes these lines of it. A part of which nothing is left goes, unless it is the last one."""
        found: list[Splice] = []
        at = 0
        for content in self.contents:
            new = texts[at : at + len(content.strings)]
            old = self.texts[at : at + len(content.strings)]
            at += len(content.strings)
            if [list(lines) for lines in new] != [list(lines) for lines in old]:
                found.append(self._content(content, old, new))
        return found

    def _content(self, content: _Content, old: Sequence[Sequence[str]], new: Sequence[Sequence[str]]) -> Splice:
        place, body = content.place, self.body
        if not content.parts:
            return Splice(place.start, place.end, _literal(new[0]))
        told = {part: (body[each.start : each.end]) for part, each in enumerate(content.parts)}
        for (part, string), before, lines in zip(content.strings, old, new, strict=True):
            if list(before) == list(lines):
                continue
            whole = content.parts[part]
            if not any(map(str.strip, lines)) and len(told) > 1:
                del told[part]
                continue
            inner = Splice(string.start - whole.start, string.end - whole.start, _literal(lines))
            told[part] = spliced(told[part], [inner])
        return Splice(place.start, place.end, f"[{','.join(told.values())}]")


def system_prompt(form: Form) -> SystemPrompt:
    """Find the system prompt of a body of any protocol; one without is empty."""
    body, contents = form.text, list[_Content]()
    for name in ("system", "instructions"):
        if (found := place_of(form, name)) is not None:
            contents.append(_content_at(body, found))
    for name in ("messages", "input"):
        array = place_of(form, name)
        first = first_object(body, array) if array is not None else None
        if first is None or not is_system(first.value):
            continue
        if (content := members(body, first).get("content")) is not None:
            contents.append(_content_at(body, content))
    texts = [_lines(body[string.start + 1 : string.end - 1]) for content in contents for _, string in content.strings]
    return SystemPrompt(body, tuple(contents), tuple(texts))


def is_system(message: object) -> bool:
    """Tell whether a message speaks for the operator."""
    return isinstance(message, dict) and message.get("role") in _SYSTEM_ROLES


def said(raw: str) -> str:
    """Return what a part of a JSON string says."""
    if "\\" not in raw:
        return raw
    try:
        text = json.loads(f'"{raw}"')
    except ValueError:
        return raw
    assert isinstance(text, str)
    return text


def _content_at(body: str, place: Place) -> _Content:
    if isinstance(place.value, str):
        return _Content(place, (), ((0, place),))
    parts, strings = tuple(elements(body, place)), list[tuple[int, Place]]()
    for number, part in enumerate(parts):
        text = members(body, part).get("text")
        if text is not None and isinstance(text.value, str):
            strings.append((number, text))
    return _Content(place, parts, tuple(strings))


def _lines(raw: str) -> tuple[str, ...]:
    """Split the inside of a JSON string where it says that a line ends."""
    lines, start = list[str](), 0
    for escape in _ESCAPE.finditer(raw):
        if escape[0] == r"\n":
            lines.append(raw[start : escape.start()])
            start = escape.end()
    return (*lines, raw[start:])


def _literal(lines: Sequence[str]) -> str:
    return '"' + r"\n".join(lines) + '"'
