"""What differs between two price books, in words. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from billing.prices import PriceBook


def diff(before: PriceBook, after: PriceBook) -> list[str]:
    """Return one line for each difference: ``-`` is gone, ``+`` is new, ``~`` has another value.

    Entries are told apart by models, teams, regions and dates, not by where they stand; where only the order differs,
    that is a line too, since the first entry that fits counts.
    """
    old, new = _entries(before), _entries(after)
    lines = list(_changes("book", _head(before), _head(after)))
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            lines.append(f"- {name}")
        elif name not in old:
            lines.append(f"+ {name}")
        else:
            lines += _changes(name, old[name], new[name])
    if [name for name in old if name in new] != [name for name in new if name in old]:
        lines.append("~ the order of the entries")
    return lines


_HEAD_KEYS = (
    "name",
    "currency",
    "rounding",
    "holidays",
    "prefix_writes",
    "lost_hit_credits",
    "costs",
    "allowance",
)


def _head(book: PriceBook) -> dict[str, object]:
    content = json.loads(book.body)
    return {name: content.get(name) for name in _HEAD_KEYS}


def _entries(book: PriceBook) -> dict[str, dict[str, object]]:
    found = {}
    for entry in json.loads(book.body)["price"]:
        where = ", ".join(entry.pop("models"))
        for name in ("teams", "regions"):
            if name in entry:
                where += f" {name} {', '.join(entry.pop(name))}"
        for name in ("effective_from", "effective_to"):
            if name in entry:
                where += f" {name.removeprefix('effective_')} {entry.pop(name)}"
        found[where] = entry
    return found


def _changes(where: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _changes(
                f"{where}: {name}" if ":" not in where else f"{where}.{name}", old.get(name), new.get(name)
            )
    elif old != new:
        shown = ["nothing" if value is None else json.dumps(value) for value in (old, new)]
        yield f"~ {where}: {shown[0].strip(chr(34))} -> {shown[1].strip(chr(34))}"
