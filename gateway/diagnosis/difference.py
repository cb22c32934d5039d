"""The first place at which two JSON values differ: its path, and the values that stand there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tracing.messages import item_role

MARKER: Final = "cache_control"
_BOOKKEEPING: Final = frozenset({MARKER, "id", "status"})
_MARKERS: Final = frozenset({MARKER})
_MISSING: Final = object()


class How(StrEnum):
    """In which way two values differ."""

    VALUE = "value"
    ADDED = "added"
    REMOVED = "removed"
    ORDER = "order"  # an object's members stand in another order


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two values differ first. ``before`` and ``after`` are what stands there, ``None`` where nothing does."""

    path: str
    before: object
    after: object
    how: How


def unsaid_members(value: Mapping[str, object]) -> frozenset[str]:
    """Return which members of an object no prompt shows: cache markers, and what names an item of a response."""
    return _BOOKKEEPING if "role" in value or item_role(value.get("type")) else _MARKERS


def differences(before: object, after: object, path: str, *, ordered: bool) -> Iterator[Difference]:
    """Yield where two values differ, in the latter's order. Cache markers count as nothing.

    ``ordered``: the order of an object's members counts, since a chat template prints it.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(before, after, path, ordered)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(before, after, path, ordered)
    elif type(before) is not type(after) or before != after:
        yield Difference(path, before, after, How.VALUE)


def marker_differences(before: object, after: object, path: str) -> Iterator[Difference]:
    """Yield where two values that are otherwise equal differ in their cache markers."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = before.get(MARKER, _MISSING), after.get(MARKER, _MISSING)
        if old != new:
            yield Difference(
                f"{path}.{MARKER}",
                None if old is _MISSING else old,
                None if new is _MISSING else new,
                How.REMOVED if new is _MISSING else How.ADDED if old is _MISSING else How.VALUE,
            )
        for name, value in after.items():
            if name in before:
                yield from marker_differences(before[name], value, f"{path}.{name}")
    elif isinstance(before, list) and isinstance(after, list):
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from marker_differences(old, new, f"{path}[{index}]")


def _of_objects(
    before: Mapping[str, object], after: Mapping[str, object], path: str, ordered: bool
) -> Iterator[Difference]:
    unsaid = unsaid_members(after)
    old = [name for name in before if name not in unsaid]
    new = [name for name in after if name not in unsaid]
    for name in new:
        if name not in before:
            yield Difference(f"{path}.{name}", None, after[name], How.ADDED)
        else:
            yield from differences(before[name], after[name], f"{path}.{name}", ordered=ordered)
    for name in old:
        if name not in after:
            yield Difference(f"{path}.{name}", before[name], None, How.REMOVED)
    if ordered and old != new and set(old) == set(new):
        yield Difference(path, dict(before), dict(after), How.ORDER)


def _of_lists(before: list[object], after: list[object], path: str, ordered: bool) -> Iterator[Difference]:
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        yield from differences(old, new, f"{path}[{index}]", ordered=ordered)
    if len(after) > len(before):
        yield Difference(f"{path}[{len(before)}]", None, after[len(before)], How.ADDED)
    elif len(before) > len(after):
        yield Difference(f"{path}[{len(after)}]", before[len(after)], None, How.REMOVED)
