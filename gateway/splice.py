"""How an answer that several engines gave in turn looks like one.

An engine that goes on with another's answer starts a stream of its own: with a new id, a role, and counts of what it
took for its prompt. A ``Splice`` turns that stream's events into those that the first engine would have sent next, so
that the reader of the client's protocol follows on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine_adapter.base import Begun, EngineAdapter, UsageParts
from gateway.protocols.counting import engine_usage
from gateway.protocols.decode import json_object
from gateway.protocols.deltas import finish_reason_of
from gateway.protocols.openai import DONE, DONE_EVENT
from gateway.protocols.sse import data_of, event_of
from tracing.record import HitSource, Usage

IDS_COMMENT = b": ids "
"""The line with which the embedded engine tells, before an event, the ids of the tokens that were generated for it."""

_REASONING_MEMBERS = ("reasoning_content", "reasoning")
_THINKING_END = "</think>"
_DETAIL = "cached_tokens_details"
_HIT_MEMBERS = ("prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "cached_tokens", "cache_read_input_tokens")
_HIT_DETAILS = ("cached_tokens", "cache_write_tokens", "cache_creation_input_tokens", "cache_creation")

Json = dict[str, object]


class Journal:
    """The ids of an answer's tokens as they come, and how many pieces of text and calls came of them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._pieces: Callable[[], int] = lambda: 0
        self.is_whole = True  # every engine that has answered so far told its ids

    def follow(self, pieces: Callable[[], int]) -> None:
        """Count pieces by what the answer's reader has seen."""
        self._pieces = pieces

    def begun(self) -> Begun | None:
        """Return the answer so far, ``None`` where its ids are not known."""
        return Begun(list(self.ids), self._pieces()) if self.is_whole and self.ids else None

    def __call__(self, event: bytes) -> Sequence[bytes]:
        """Take the ids out of an event; return what is left of it."""
        if event.startswith(IDS_COMMENT):
            line, _, event = event.partition(b"\n")
            self.ids += map(int, line[len(IDS_COMMENT) :].split())
        return (event,)


@dataclass(frozen=True, slots=True)
class Seam:
    """What was delivered where one engine's answer ends and the next one's begins.

    ``prompt_tokens``: of the client's prompt, by the gateway's count, ``None`` where that is not known.
    ``said_tokens``: of what was delivered, by count or estimate.
    ``held``: delivered text at the end that the engine was not given, since it will say it again.
    ``in_reasoning``: the answer's text has not begun.
    ``raw``: the engine sends reasoning as text, with the mark that ends it.
    """

    text: str = ""
    prompt_tokens: int | None = None
    said_tokens: int = 0
    held: str = ""
    stops: Sequence[str] = ()
    in_reasoning: bool = False
    raw: bool = False


class Splice:
    """Turns the events of an engine's chat completion, or completion, into the next ones of the client's answer."""

    def __init__(
        self,
        head: Mapping[str, object] | None,
        adapter: EngineAdapter,
        seam: Seam | None,
        *,
        shows_private: bool,
        hits: Usage | None = None,
    ) -> None:
        """``head``: id, time and model of the first engine's stream. ``seam`` is ``None`` where nothing was delivered,
        or where the engine restores all by itself, counts included. ``shows_private``: the reader knows this kind of
        engine's private members, and what to do with them. ``hits``: of the prompt, at the engine that began the
        answer; this one's are its own affair."""
        self._head, self._adapter, self._seam = dict(head or {}), adapter, seam
        self._drops = frozenset() if shows_private and seam is None else adapter.private_members
        self._held = seam.held if seam is not None else ""
        self._mark = _Mark() if seam is not None and seam.raw and seam.in_reasoning else None
        self._stops = SeamStops(seam.text, seam.stops) if seam is not None and seam.stops else None
        self._is_over = False
        self._hits, self._told = hits, UsageParts(None, None)

    def own_hits(self) -> Usage | None:
        """Return what the engine that goes on says it had of what it was given, once it has."""
        return engine_usage(self._adapter, self._told.usage, self._told.extension)

    def __call__(self, event: bytes) -> Sequence[bytes]:
        """Return the events for this one."""
        if self._is_over:
            return ()
        data = data_of(event)
        chunk = json_object(data) if data is not None and data.strip() != DONE else None
        if chunk is None or ("error" in chunk and "choices" not in chunk):
            return (event,)
        shown: Json = {name: value for name, value in {**chunk, **self._head}.items() if name not in self._drops}
        has_usage = chunk.get("usage") is not None
        if self._hits is not None or (has_usage and self._seam is not None):
            self._count(chunk, shown)
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(first := choices[0], dict):
            choice = self._choice(first)
            shown["choices"] = [] if choice is None else [choice]
            if choice is None and not has_usage:
                return ()
        made = event_of(msgspec.json.encode(shown))
        return (made, DONE_EVENT) if self._is_over else (made,)

    def _count(self, chunk: Json, shown: Json) -> None:
        """Let the event show the counts of the whole answer."""
        parts = self._adapter.read_usage(chunk)
        if parts is None:
            return
        self._told = UsageParts(parts.usage or self._told.usage, parts.extension or self._told.extension)
        if chunk.get("usage") is not None:
            usage = parts.usage or {}
            whole = usage if self._seam is None else whole_usage(usage, self._seam)
            shown["usage"] = whole if self._hits is None else with_hits(whole, self._hits)
        if self._hits is None:
            return
        for name in self._adapter.private_members:
            if isinstance(held := shown.get(name), dict) and _DETAIL in held:
                shown[name] = {**held, _DETAIL: _tiers(self._hits)}

    def _choice(self, choice: Json) -> Json | None:
        """Return the choice as the client's stream has it, ``None`` where nothing is left of it."""
        is_last = finish_reason_of(choice) is not None
        part = choice.get("delta")
        if isinstance(part, dict):
            delta = {name: value for name, value in part.items() if name != "role" and value not in (None, "", [])}
            self._place(delta)
            delta["content"] = self._new(delta.get("content"), is_last)
            said: Json = {"delta": {name: value for name, value in delta.items() if value}}
            is_empty = not said["delta"]
        else:
            said = {"text": self._new(choice.get("text"), is_last)}
            is_empty = not said["text"]
        if self._is_over and self._stops is not None:
            return {**choice, **said, "finish_reason": "stop", "matched_stop": self._stops.matched}
        return None if is_empty and not is_last else {**choice, **said}

    def _place(self, delta: Json) -> None:
        """Put text where it belongs: an engine that starts inside an answer may take it for reasoning, or reasoning
        for text."""
        if self._seam is None:
            return
        thought = next((delta.pop(name) for name in _REASONING_MEMBERS if name in delta), None)
        content = delta.pop("content", None)
        reasoning, text = thought if isinstance(thought, str) else "", content if isinstance(content, str) else ""
        if not self._seam.in_reasoning:
            reasoning, text = "", reasoning + text
        elif self._mark is not None:
            reasoning, text = self._mark.split(reasoning + text)
        delta |= {name: value for name, value in (("reasoning_content", reasoning), ("content", text)) if value}

    def _new(self, said: object, is_last: bool) -> str:
        """Return what of this text is new to the client."""
        text = said if isinstance(said, str) else ""
        if self._held and text:
            same = _same_chars(self._held, text)
            self._held = self._held[same:] if same == len(text) else ""
            text = text[same:]
        if self._stops is not None:
            text = self._stops.take(text, is_last=is_last)
            self._is_over = self._stops.matched is not None
        return text


def whole_usage(usage: Mapping[str, object], seam: Seam) -> Json:
    """Return an OpenAI usage object of the whole answer: the prompt's tokens once, all others as output.

    The engine counted the delivered text into its prompt. Hits beyond the prompt are of that text, and none of it.
    """
    counted, new = _number(usage.get("prompt_tokens")), _number(usage.get("completion_tokens"))
    prompt = seam.prompt_tokens if seam.prompt_tokens is not None else max(counted - seam.said_tokens, 0)
    output = max(counted + new - prompt, new)
    whole: Json = {**usage, "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        whole["prompt_tokens_details"] = {
            **details,
            "cached_tokens": min(_number(details.get("cached_tokens")), prompt),
        }
    return whole


def with_hits(usage: Mapping[str, object], hits: Usage) -> Json:
    """Return an OpenAI usage object with these hits of its prompt, in the place of all that it says of caches."""
    whole: Json = {name: value for name, value in usage.items() if name not in _HIT_MEMBERS}
    told = usage.get("prompt_tokens_details")
    details = {n: v for n, v in told.items() if n not in _HIT_DETAILS} if isinstance(told, dict) else {}
    if hits.hit_source is not HitSource.UNKNOWN:
        details["cached_tokens"] = min(hits.hit_tokens, _number(usage.get("prompt_tokens")))
    whole["prompt_tokens_details"] = details or None
    return whole


def _tiers(hits: Usage) -> Json | None:
    """Return hits by tier as SGLang tells them; ``None`` where they are not known so."""
    if hits.hit_source not in (HitSource.REPORTED, HitSource.INFERRED) or hits.hit_unknown_tokens:
        return None
    disk, pool = hits.hit_disk_tokens, hits.hit_pool_tokens
    stored: Json = {"storage": disk + pool, "disk": disk, "pool": pool}
    return {"device": hits.hit_device_tokens, "host": hits.hit_host_tokens, **stored}


class SeamStops:
    """Looks for a stop text of which one part was delivered before a seam and the rest comes behind it.

    The engine that goes on knows only of what it says itself. O(the longest stop text).
    """

    def __init__(self, text: str, stops: Sequence[str]) -> None:
        reach = max(map(len, stops)) - 1
        self._joined = text[-reach:] if reach else ""
        self._seam, self._stops = len(self._joined), tuple(stops)
        self._is_done = not self._joined
        self.matched: str | None = None

    def take(self, text: str, *, is_last: bool) -> str:
        """Return what is certain of new text; nothing from where ``matched`` is set on."""
        if self._is_done or self.matched is not None:
            return text if self.matched is None else ""
        self._joined += text
        for start in range(self._seam):
            tail = self._joined[start:]
            self.matched = next((stop for stop in self._stops if tail.startswith(stop)), None)
            if self.matched is not None:
                return ""
            if not is_last and any(stop.startswith(tail) for stop in self._stops):
                return ""  # held back until it is one, or cannot be one any more
        self._is_done = True
        return self._joined[self._seam :]


class _Mark:
    """Splits raw output into reasoning and text at the mark between them, however it is cut into pieces."""

    def __init__(self) -> None:
        self._held, self._is_passed, self._is_at_start = "", False, True

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the text in this piece."""
        if self._is_passed:
            return "", self._behind(text)
        self._held += text
        before, mark, after = self._held.partition(_THINKING_END)
        if mark:
            self._is_passed, self._held = True, ""
            return before, self._behind(after)
        keep = next((n for n in range(len(_THINKING_END) - 1, 0, -1) if before.endswith(_THINKING_END[:n])), 0)
        self._held = before[len(before) - keep :]
        return before[: len(before) - keep], ""

    def _behind(self, text: str) -> str:
        """Return text without the line breaks that only part it from the reasoning."""
        if self._is_at_start:
            text = text.lstrip("\n")
            self._is_at_start = not text
        return text


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _same_chars(left: str, right: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
