"""Changes to a JSON text that leave every byte outside of them as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.protocols.form import Form, scan_text


@dataclass(frozen=True, slots=True)
class Splice:
    """What stands from ``start`` to ``end`` of a text becomes ``text``."""

    start: int
    end: int
    text: str


def spliced(text: str, splices: Iterable[Splice]) -> str:
    """Return the text with disjoint changes made. O(text)."""
    pieces, at = [], 0
    for splice in sorted(splices, key=lambda each: each.start):
        pieces += [text[at : splice.start], splice.text]
        at = splice.end
    return "".join([*pieces, text[at:]])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands in a text, and what it is."""

    value: object
    start: int
    end: int


def place_of(form: Form, name: str) -> Place | None:
    """Return where a member's (last) value stands."""
    for member in reversed(form.members):
        if member.name == name:
            return Place(member.value, member.start, member.end)
    return None


def elements(text: str, array: Place) -> Iterator[Place]:
    """Yield the places of an array's elements; nothing for anything else. The text was read before: it is JSON."""
    if not isinstance(array.value, list):
        return
    # An object around it lets the same scanner tell the elements' ends.
    inner = scan_text(f'{{"_":{text[array.start : array.end]}}}', grows="_")
    shift, start = array.start - 5, 6
    for value, end in zip(array.value, inner.ends, strict=True):
        while inner.text[start] in " \t\r\n,":
            start += 1
        yield Place(value, start + shift, end + shift)
        start = end


def first_object(text: str, array: Place) -> Place | None:
    """Return an array's first element where it is an object; what stands behind it is not looked at."""
    if not isinstance(array.value, list) or not array.value or not isinstance(array.value[0], dict):
        return None
    start = text.index("{", array.start)
    return Place(array.value[0], start, scan_text(text, start, whole=False).end)


def members(text: str, place: Place) -> dict[str, Place]:
    """Return the members of an object by name; of a name that stands twice the last, as parsers have it."""
    if not isinstance(place.value, dict):
        return {}
    form = scan_text(text, place.start, whole=False)
    return {member.name: Place(member.value, member.start, member.end) for member in form.members}
