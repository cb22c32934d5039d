"""Characters that an engine cut in two: halves of surrogate pairs, as JSON escapes, in chunks that follow each other.

An engine that counts text in UTF-16 may end a chunk with ``\\ud83d`` and begin the next with ``\\ude00``. Each of them
is JSON that no strict parser takes and that UTF-8 has no bytes for. Here the first half waits for the second; one that
stays alone is shown as U+FFFD. Chunks without such escapes go through as they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.protocols.decode import HALF_ESCAPE, json_object, mended, mended_text, with_halves
from gateway.protocols.deltas import finish_reason_of
from gateway.protocols.sse import data_of, event_of, with_data

_ESCAPE = b"\\u"
_LONE = "\ufffd"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """One of a chunk's texts that later chunks go on with."""

    choice: int
    name: str
    call: int | None = None


class PairJoiner:
    """Joins halves over the events of one stream of chat completions, or completions. Others go through."""

    def __init__(self) -> None:
        self._held: dict[_Place, str] = {}

    def join(self, events: Sequence[bytes]) -> Sequence[bytes]:
        """Return the events with whole characters. Costs one look for an escape in events that have none."""
        if not self._held:
            for event in events:
                if _ESCAPE in event and HALF_ESCAPE.search(event) is not None:
                    break
            else:
                return events
        return [joined for event in events for joined in self._joined(event)]

    def _joined(self, event: bytes) -> Iterable[bytes]:
        data = data_of(event)
        chunk = None if data is None else with_halves(data)
        is_odd = chunk is not None
        if data is not None and not is_odd and self._held:
            chunk = json_object(data)
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            return (event,)
        choices = [choice for choice in chunk["choices"] if isinstance(choice, dict)]
        texts = [found for choice in choices for found in _texts(choice)]
        ended = {_number(choice) for choice in choices if finish_reason_of(choice) is not None}
        grown = {place for place, _, _ in texts}
        alone = [place for place in self._held if self._is_over(place, ended, grown)]
        before = [event_of(msgspec.json.encode(self._shown_alone(chunk, place))) for place in alone]
        for place, holder, name in texts:
            told = holder[name]
            holder[name] = self._taken(place, told, is_last=place.choice in ended)
            is_odd = is_odd or holder[name] != told
        return (*before, with_data(event, msgspec.json.encode(mended(chunk)))) if is_odd else (*before, event)

    def _taken(self, place: _Place, text: str, *, is_last: bool) -> str:
        text = self._held.pop(place, "") + text
        if not is_last and "\ud800" <= text[-1] <= "\udbff":
            text, self._held[place] = text[:-1], text[-1]
        return mended_text(text)

    def _is_over(self, place: _Place, ended: set[int], grown: set[_Place]) -> bool:
        """Tell whether the second half cannot come any more: its choice ends, or has gone on to another text."""
        if place in grown:
            return False
        has_gone_on = place.call is None and any(other.choice == place.choice for other in grown)
        return place.choice in ended or has_gone_on

    def _shown_alone(self, chunk: Json, place: _Place) -> Json:
        del self._held[place]
        part: Json = {place.name: _LONE}
        if place.call is not None:
            part = {"tool_calls": [{"index": place.call, "function": {"arguments": _LONE}}]}
        choice: Json = {"index": place.choice, "finish_reason": None}
        choice |= part if place.name == "text" else {"delta": part}
        alone: Json = mended({**{n: v for n, v in chunk.items() if n != "usage"}, "choices": [choice]})
        return alone


def _texts(choice: Json) -> Iterator[tuple[_Place, Json, str]]:
    """Yield a choice's texts that are not empty: which, the object that it is in, and its name there."""
    number, delta = _number(choice), choice.get("delta")
    if isinstance(text := choice.get("text"), str) and text:
        yield _Place(number, "text"), choice, "text"
    if not isinstance(delta, dict):
        return
    for name in _TEXTS:
        if isinstance(text := delta.get(name), str) and text:
            yield _Place(number, name), delta, name
    calls = delta.get("tool_calls")
    for position, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str) and text:
            index = call.get("index")
            yield _Place(number, "call", index if isinstance(index, int) else position), function, "arguments"


def _number(choice: Json) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else 0
