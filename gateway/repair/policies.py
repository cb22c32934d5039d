"""The policies: pure functions from a body to what of its text is to change.

What a client sends anew at every start, day or version, in front of what stays the same, costs the whole prefix behind
it. Each policy but one undoes such a habit, and says nothing where there is nothing to undo; that one takes out what
engines of one's own cannot be given, and would be a reason to refuse the request:

==========================  ============================================================================================
``drop-attribution``        the system prompt's line ``x-anthropic-billing-header: …``, which names the client's version
``drop-vendor-tools``       tools that only their vendor's models know, or run at the vendor (web search …)
``sort-tools``              tools in the order of their names
``canonical-keys``          the members of tools (and of all objects in them) in the order of their names
``move-volatile-lines``     lines of the system prompt's front that hold a date, a time or an identifier, to its end
==========================  ============================================================================================

Nothing but the member at hand is touched; in it order changes; numbers, escapes and texts stay as they were spelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from gateway.protocols.form import Form, scan_text
from gateway.protocols.responses.custom_tools import CUSTOM
from gateway.protocols.responses.tools import FUNCTION, NAMESPACE
from gateway.repair.splice import Place, Splice, elements, place_of
from gateway.repair.system import said, system_prompt

FRONT_LINES = 40
"""Lines of a system prompt that are its front."""

MAX_MOVED_CHARS = 300
"""A longer line is an instruction that happens to name a date."""

_ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*")
_VOLATILE = re.compile(
    r"\b\d{4}-\d{2}-\d{2}\b"
    r"|\b\d{1,2}/\d{1,2}/\d{4}\b"
    r"|\b\d{1,2}:\d{2}(?::\d{2})?\b"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:st|nd|rd|th)?,? \d{4}\b"
    r"|\b\d{1,2}\.? (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{4}\b"
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{16,}\b"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b"
)

_ANYBODYS = (FUNCTION, CUSTOM, NAMESPACE)
"""Types of tools that engines can be given. Messages' own have none, or ``custom``."""

Policy = Callable[[Form], list[Splice]]


def drop_attribution(form: Form) -> list[Splice]:
    """Take the client's version out of the system prompt."""
    prompt = system_prompt(form)
    kept = [[line for line in lines if not _ATTRIBUTION.fullmatch(said(line).strip())] for lines in prompt.texts]
    return prompt.rewritten(kept)


def move_volatile_lines(form: Form) -> list[Splice]:
    """Move lines that change from day to day, or from run to run, behind what stays."""
    prompt, kept, moved, seen = system_prompt(form), list[list[str]](), list[str](), 0
    for lines in prompt.texts:
        front = max(FRONT_LINES - seen, 0)
        is_moved = [number < front and _is_volatile(line) for number, line in enumerate(lines)]
        moved += [line for line, goes in zip(lines, is_moved, strict=True) if goes]
        kept.append([line for line, goes in zip(lines, is_moved, strict=True) if not goes])
        seen += len(lines)
    if not moved:
        return []
    kept[-1] += moved
    return prompt.rewritten(kept)


def _is_volatile(line: str) -> bool:
    return len(line) <= MAX_MOVED_CHARS and _VOLATILE.search(said(line)) is not None


def drop_vendor_tools(form: Form) -> list[Splice]:
    """Take out tools that their vendor's models alone know: neither functions nor custom tools, nor a namespace."""
    array = place_of(form, "tools")
    tools = [] if array is None else list(elements(form.text, array))
    kept = [tool for tool in tools if not _is_vendors(tool.value)]
    if array is None or len(kept) == len(tools):
        return []
    texts = [form.text[tool.start : tool.end] for tool in kept]
    return [Splice(array.start, array.end, f"[{','.join(texts)}]")]


def _is_vendors(tool: object) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in _ANYBODYS


def sort_tools(form: Form) -> list[Splice]:
    """Put tools into the order of their names; those without one stay behind the others, in their own order."""
    array = place_of(form, "tools")
    if array is None:
        return []
    text = form.text
    tools = list(elements(text, array))
    ordered = sorted(tools, key=lambda tool: _name_of(tool.value))
    if ordered == tools:
        return []
    return [
        Splice(place.start, place.end, text[tool.start : tool.end]) for place, tool in zip(tools, ordered, strict=True)
    ]


def canonical_keys(form: Form) -> list[Splice]:
    """Put the members of tools, and of all objects in them, into the order of their names."""
    found: list[Splice] = []
    for name in ("tools", "functions"):
        array = place_of(form, name)
        if array is not None and isinstance(array.value, list | dict):
            raw = form.text[array.start : array.end]
            if (canonical := _canonical(raw)) != raw:
                found.append(Splice(array.start, array.end, canonical))
    return found


POLICIES: Mapping[str, Policy] = {
    "drop-attribution": drop_attribution,
    "drop-vendor-tools": drop_vendor_tools,
    "sort-tools": sort_tools,
    "canonical-keys": canonical_keys,
    "move-volatile-lines": move_volatile_lines,
}
"""By name, in the order in which they are applied."""


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Return which policies are named, each once, as they are applied."""
    return tuple(name for name in POLICIES if name in names)


@lru_cache(maxsize=64)
def _canonical(raw: str) -> str:
    """Return a value's text with all objects' members in order. An agent's tools are the same at every step."""
    holder = scan_text(f'{{"_":{raw}}}')
    return _ordered(holder.text, Place(holder.values["_"], 5, len(holder.text) - 1))


def _ordered(text: str, place: Place) -> str:
    if isinstance(place.value, list):
        inner = [Splice(each.start, each.end, _ordered(text, each)) for each in elements(text, place)]
        return _within(text, place, inner)
    if not isinstance(place.value, dict):
        return text[place.start : place.end]
    form = scan_text(text, place.start, whole=False)
    if len(form.values) < len(form.members):
        return text[place.start : place.end]  # a name twice: which of them counts may hang on the order
    told = [
        text[member.key_start : member.start] + _ordered(text, Place(member.value, member.start, member.end))
        for member in sorted(form.members, key=lambda member: member.name)
    ]
    inner = [Splice(member.key_start, member.end, each) for member, each in zip(form.members, told, strict=True)]
    return _within(text, place, inner)


def _within(text: str, place: Place, splices: list[Splice]) -> str:
    at, pieces = place.start, list[str]()
    for splice in splices:
        pieces += [text[at : splice.start], splice.text]
        at = splice.end
    return "".join([*pieces, text[at : place.end]])


def _name_of(tool: object) -> tuple[bool, str]:
    if not isinstance(tool, dict):
        return True, ""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return (False, name) if isinstance(name, str) else (True, "")
