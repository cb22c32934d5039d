"""Two consecutive requests held against each other: what stands otherwise, of what kind it is, how much stood behind.

Sections are looked at in the order in which they can break a prompt: model, parameters that are sure to matter
(template, adapter, cache salt), tools, system, messages, then parameters that some templates read, then spelling and
cache markers, which matter only where nothing else differs. Whether anything was lost by a change is not decided here:
that needs what the engine reported (``cards``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

import msgspec

from gateway.diagnosis.difference import Difference, How, differences, marker_differences
from gateway.diagnosis.echo import echo_difference
from gateway.diagnosis.patterns import Spot, differing, told_apart
from gateway.diagnosis.sections import (
    NAMESPACE,
    PARAMS,
    RENDERING,
    SYSTEM,
    TOOLS,
    Kept,
    digest,
    goes_on,
    is_system,
    name_of,
    weight,
    without_markers,
)
from tracing.detail import BreakKind, Comparison, PromptChange

EXCERPT_CHARS: Final = 120
MAX_ALSO: Final = 6
REPEATED_CHARS: Final = 32
"""Of a rewritten end, as much must have been said before to call it a change and not another way to go on."""

_REASONING: Final = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Found:
    """A difference within a section, with what surrounds it: characters of prompt before it, and repeated behind it."""

    section: str
    difference: Difference
    kept_chars: int = 0
    repeated_chars: int = 0
    kind: BreakKind | None = None  # where it is known already


def compare(former: Kept, latter: Kept, *, shows_words: bool) -> tuple[Comparison, PromptChange | None]:
    """Return how a request follows the one that it continues, and the first thing that it says otherwise.

    Cost: O(text) at memory speed where it only appends; else both are parsed and walked.
    """
    if goes_on(former, latter):
        echo = echo_difference(former, latter)
        if echo is None:
            return Comparison.APPENDED, None
        found: Found | None = Found(*echo)
        also: list[str] = []
        shortened, total = False, len(latter.member(latter.conversation_name() or "") or "")
    else:
        pair = _Pair(former, latter)
        changes = list(islice(pair.changes(), MAX_ALSO + 1))
        shortened, total = pair.is_shortened, pair.total_chars
        found, also = (changes[0] if changes else None), [each.difference.path for each in changes[1:]]
        if found is None:
            echo = echo_difference(former, latter)
            found = None if echo is None else Found(*echo)
    if found is None:
        return (Comparison.SHORTENED if shortened else Comparison.APPENDED), None
    change = _told(found, total, also, shows_words=shows_words)
    if shortened and change.repeated_chars < REPEATED_CHARS:
        return Comparison.SHORTENED, None
    return Comparison.CHANGED, change


class _Pair:
    """Two requests, parsed."""

    def __init__(self, former: Kept, latter: Kept) -> None:
        self._former, self._latter = former, latter
        self._tools = tuple(_first(each, TOOLS) for each in (former, latter))
        self._name = latter.conversation_name() or former.conversation_name() or "messages"
        self._messages = (former.conversation(), latter.conversation())
        self._tool_chars = weight(self._tools[1]) if self._tools[1] is not None else 0
        self._system_chars = sum(len(latter.member(name) or "") for name in SYSTEM)
        self._weights = [weight(message) for message in self._messages[1]]
        self._names = tuple([name_of(message) for message in messages] for messages in self._messages)
        self.total_chars = self._tool_chars + self._system_chars + sum(self._weights)

    @property
    def is_shortened(self) -> bool:
        """Whether the latter has fewer messages."""
        return len(self._messages[1]) < len(self._messages[0])

    def changes(self) -> Iterator[Found]:
        """Yield what differs by value, in order; what differs in spelling or markers only where nothing else does."""
        found = False
        for each in (self._members(("model",), "model"), self._sure_params(), self._of_tools(), self._of_system(),
                     self._of_messages()):  # fmt: skip
            for change in each:
                found = True
                yield change
        if not found:
            for each in (self._members(PARAMS, "params"), self._spelled(), self._marked()):
                yield from each

    def _members(self, names: Sequence[str], section: str) -> Iterator[Found]:
        for name in names:
            old, new = self._former.value(name), self._latter.value(name)
            if old != new:
                how = How.ADDED if old is None else How.REMOVED if new is None else How.VALUE
                kind = _MEMBER_KINDS.get(name, BreakKind.PARAMS_CHANGED)
                yield Found(section, Difference(name, old, new, how), 0, self._repeated(0), kind)

    def _sure_params(self) -> Iterator[Found]:
        yield from self._members((*RENDERING, *NAMESPACE), "params")

    def _of_tools(self) -> Iterator[Found]:
        old, new = self._tools
        name = next((name for name in TOOLS if name in self._latter.places or name in self._former.places), "tools")
        later = self._system_chars + self._repeated(0)
        if not isinstance(old, list) or not isinstance(new, list):
            if old != new:
                yield Found("tools", Difference(name, old, new, How.VALUE), 0, later, BreakKind.TOOLS_CHANGED)
            return
        olds, news = [name_of(tool) for tool in old], [name_of(tool) for tool in new]
        held, weights = Counter(olds), [weight(tool) for tool in new]
        ends = [0, *accumulate(weights)]
        repeated = [0, *accumulate(size if held[name] else 0 for size, name in zip(weights, news, strict=True))]
        for index in range(max(len(olds), len(news))):
            before, after = (old[index] if index < len(old) else None), (new[index] if index < len(new) else None)
            kept = ends[min(index, len(new))]
            again = repeated[-1] - repeated[min(index + 1, len(new))] + later
            path = f"{name}[{index}]"
            if olds[index : index + 1] == news[index : index + 1]:
                for inner in differences(before, after, path, ordered=True):
                    yield Found("tools", inner, kept, again + _tail(inner))
            elif sorted(olds) == sorted(news):
                moved = weight(after) + again
                yield Found("tools", Difference(path, before, after, How.ORDER), kept, moved, BreakKind.TOOLS_REORDERED)
                return
            elif before is not None and after is not None and _tool_name(before) == _tool_name(after):
                for inner in differences(before, after, path, ordered=True):
                    yield Found("tools", inner, kept, again + _tail(inner))
            else:
                how = (
                    How.ADDED if before is None or olds[index] in news else How.REMOVED if after is None else How.VALUE
                )
                yield Found("tools", Difference(path, before, after, how), kept, again, BreakKind.TOOLS_CHANGED)
                return

    def _of_system(self) -> Iterator[Found]:
        for name in SYSTEM:
            old, new = self._former.value(name), self._latter.value(name)
            for inner in differences(old, new, name, ordered=False):
                yield Found("system", inner, self._tool_chars, self._repeated(0) + _tail(inner))

    def _of_messages(self) -> Iterator[Found]:
        old, new = self._messages
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            section = "system" if is_system(after) and is_system(before) else f"{self._name}[{index}]"
            if self._names[0][index] == self._names[1][index]:
                continue
            kept = self._tool_chars + self._system_chars + sum(self._weights[:index])
            path, again = f"{self._name}[{index}]", self._repeated(index + 1, behind=index)
            inner = list(differences(before, after, path, ordered=False))
            if self._is_other(before, after, index):
                again += self._weights[index] if self._names[1][index] in self._names[0][index:] else 0
                whole = Difference(path, before, after, How.VALUE)
                yield Found(section, whole, kept, again, BreakKind.HISTORY_REWRITTEN)
                return
            for each in inner:
                yield Found(section, each, kept, again + _tail(each), _message_kind(before, each))

    def _is_other(self, before: object, after: object, index: int) -> bool:
        """Tell whether a place is taken by another message, not by the same one in other words."""
        if not isinstance(before, Mapping) or not isinstance(after, Mapping) or before.get("role") != after.get("role"):
            return True
        old, new = self._names
        return new[index] in old[index + 1 :] or old[index] in new[index + 1 :]

    def _repeated(self, start: int, *, behind: int = 0) -> int:
        """Return how many characters of the latter's messages from ``start`` on the former said too."""
        held = Counter(self._names[0][behind:])
        chars = 0
        for name, size in zip(self._names[1][start:], self._weights[start:], strict=True):
            if held[name]:
                held[name] -= 1
                chars += size
        return chars

    def _spelled(self) -> Iterator[Found]:
        old, new = self._messages
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            for inner in differences(before, after, f"{self._name}[{index}]", ordered=True):
                if inner.how is How.ORDER:
                    kept = self._tool_chars + self._system_chars + sum(self._weights[:index])
                    again = self._repeated(index, behind=index)
                    yield Found(f"{self._name}[{index}]", inner, kept, again, BreakKind.SPELLING)

    def _marked(self) -> Iterator[Found]:
        pairs = [(name, self._former.value(name), self._latter.value(name)) for name in (*TOOLS, *SYSTEM)]
        for name, old, new in (*pairs, (self._name, *self._messages)):
            for inner in marker_differences(old, new, name):
                section = name if name in SYSTEM else "tools" if name in TOOLS else inner.path.partition(".")[0]
                yield Found(section, inner, 0, self._repeated(0), BreakKind.CACHE_CONTROL)


_MEMBER_KINDS: Final = {
    "model": BreakKind.MODEL_CHANGED,
    **dict.fromkeys(RENDERING, BreakKind.TEMPLATE_CHANGED),
    **dict.fromkeys(NAMESPACE, BreakKind.NAMESPACE_CHANGED),
}


def _first(kept: Kept, names: Sequence[str]) -> object:
    return next((kept.value(name) for name in names if name in kept.places), None)


def _tool_name(tool: object) -> object:
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool.get("name")


def _message_kind(message: object, difference: Difference) -> BreakKind | None:
    """Return the kind of a difference within an answer that is quoted; ``None`` where its words decide."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return None
    member = difference.path.rpartition(".")[2].partition("[")[0]
    part = difference.before if difference.before is not None else difference.after
    is_thought = isinstance(part, Mapping) and part.get("type") in (*_REASONING, "redacted_thinking")
    if (member in _REASONING or is_thought) and difference.how is not How.VALUE:
        return BreakKind.ECHO_REASONING
    if member == "arguments" and _same_json(difference.before, difference.after):
        return BreakKind.ECHO_TOOL_JSON
    return None


def _same_json(before: object, after: object) -> bool:
    if not isinstance(before, str) or not isinstance(after, str):
        return False
    try:
        return bool(json.loads(before) == json.loads(after))
    except (ValueError, RecursionError):
        return False


def _tail(difference: Difference) -> int:
    """Return how many characters two texts end with alike."""
    if isinstance(difference.before, str) and isinstance(difference.after, str):
        return len(difference.after) - differing(difference.before, difference.after).after_end
    return 0


def _told(found: Found, total_chars: int, also: Sequence[str], *, shows_words: bool) -> PromptChange:
    difference = found.difference
    before, after = _text(difference.before), _text(difference.after)
    kind, spot = found.kind or _same_but_spelling(difference, before, after), Spot(0, len(before), len(after))
    if before and after:
        seen, spot = told_apart(before, after) if kind is None else (kind, differing(before, after))
        kind = kind or seen
    shown_before, shown_after = (None, None)
    if shows_words:
        shown_before = _excerpt(before, spot.start, spot.before_end)
        shown_after = _excerpt(after, spot.start, spot.after_end)
    is_text = isinstance(difference.before, str) and isinstance(difference.after, str)
    return PromptChange(
        kind=kind or _DEFAULTS.get(found.section, BreakKind.HISTORY_REWRITTEN),
        section=found.section,
        path=difference.path,
        start=spot.start,
        end=spot.after_end,
        before_start=spot.start,
        before_end=spot.before_end,
        before_hash=digest(before) if difference.before is not None else "",
        after_hash=digest(after) if difference.after is not None else "",
        kept_chars=found.kept_chars + (spot.start if is_text else 0),
        repeated_chars=found.repeated_chars,
        total_chars=max(total_chars, 1),
        before=shown_before,
        after=shown_after,
        also=tuple(path for path in dict.fromkeys(also) if path != difference.path)[:MAX_ALSO],
    )


_DEFAULTS: Final = {"tools": BreakKind.TOOLS_CHANGED, "system": BreakKind.SYSTEM_EDITED}


def _same_but_spelling(difference: Difference, before: str, after: str) -> BreakKind | None:
    is_same = difference.how is How.ORDER or (before and after and before.split() == after.split())
    return BreakKind.SPELLING if is_same or _same_json(before, after) else None


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(without_markers(value)).decode()


def _excerpt(text: str, start: int, end: int) -> str:
    """Return what stands at a place and a little around it."""
    low, high = max(start - EXCERPT_CHARS // 4, 0), min(max(end, start), start + EXCERPT_CHARS) + EXCERPT_CHARS // 4
    return f"{'…' if low else ''}{text[low:high]}{'…' if high < len(text) else ''}"
