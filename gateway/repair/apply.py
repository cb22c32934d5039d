"""Repairing a body: the policies a key wants, over what of the body they mean, at the price of that alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gateway.protocols.form import Form, scan_text
from gateway.repair.policies import POLICIES, in_order
from gateway.repair.splice import Place, Splice, first_object, place_of, spliced
from gateway.repair.system import is_system

_MEMBERS = ("tools", "functions", "system", "instructions")
_HISTORIES = ("messages", "input")
Names = tuple[str, ...]


def repair(form: Form, wanted: Sequence[str]) -> tuple[str | None, Names]:
    """Return the body's text as repaired, ``None`` where nothing was to be done, and the policies that did something.

    O(tools and system prompt) for those seen the first time, and copying the body where something changes.
    """
    names = in_order(wanted)
    held = _held(form)
    if not names or not held:
        return None, ()
    before = tuple((name, form.text[place.start : place.end]) for name, place in held)
    after, applied = _repaired(before, names)
    if not applied:
        return None, ()
    changed = [
        Splice(place.start, place.end, new)
        for (_, place), (_, old), new in zip(held, before, after, strict=True)
        if new != old
    ]
    return spliced(form.text, changed), applied


def _held(form: Form) -> list[tuple[str, Place]]:
    """Return what policies look at: some members, and the history's first message where it is the operator's."""
    held = [(name, place) for name in _MEMBERS if (place := place_of(form, name)) is not None]
    for name in _HISTORIES:
        array = place_of(form, name)
        first = first_object(form.text, array) if array is not None else None
        if first is not None and is_system(first.value):
            held.append((name, first))
    return held


@lru_cache(maxsize=128)
def _repaired(held: tuple[tuple[str, str], ...], names: Names) -> tuple[tuple[str, ...], Names]:
    """Return these parts as repaired, and the policies that did something. An agent sends the same at every step."""
    told = [f'"{name}":{f"[{text}]" if name in _HISTORIES else text}' for name, text in held]
    text, applied = "{" + ",".join(told) + "}", list[str]()
    for name in names:
        if splices := POLICIES[name](scan_text(text)):
            text = spliced(text, splices)
            applied.append(name)
    form, parts = scan_text(text), list[str]()
    for name, _ in held:
        place = place_of(form, name)
        assert place is not None
        raw = text[place.start : place.end]
        parts.append(raw[1:-1] if name in _HISTORIES else raw)
    return tuple(parts), tuple(applied)
