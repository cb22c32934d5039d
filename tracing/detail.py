"""What is found out about a step after it ended, beside its record: how it could be repeated, and what it changed.

A :class:`StepDetail` is made off the request's path, from the request's text while that is still at hand, and stored
in the row of its record. It holds names, places, counts and hashes; words of the conversation only where the content
policy allows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec


class BreakKind(StrEnum):
    """Why a prefix that could have been read from a cache was computed again."""

    # what the client did
    MODEL_CHANGED = "model_changed"
    PARAMS_CHANGED = "params_changed"  # a parameter that chat templates read
    NAMESPACE_CHANGED = "namespace_changed"  # the cache salt
    TIMESTAMP = "timestamp"
    UUID = "uuid"
    COUNTER = "counter"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_CHANGED = "tools_changed"
    SPELLING = "spelling"  # the same by value: key order or white space
    CACHE_CONTROL = "cache_control"
    SYSTEM_EDITED = "system_edited"
    HISTORY_REWRITTEN = "history_rewritten"
    ECHO_REASONING = "echo_reasoning"  # an answer came back without its reasoning
    ECHO_TOOL_JSON = "echo_tool_json"  # an answer's tool call came back in another spelling
    ECHO_TEXT = "echo_text"  # an answer came back in other words
    # what the model's template does
    TEMPLATE_CHANGED = "template_changed"  # template, adapter or weights are others than a step ago
    ECHO_TEMPLATE = "echo_template"  # the template writes a quoted answer otherwise than it was generated
    # what we did
    EXPIRED = "expired"
    EVICTED = "evicted"
    ROUTED_ELSEWHERE = "routed_elsewhere"
    RESTARTED = "restarted"
    # nobody's fault, or nobody knows
    BELOW_MINIMUM = "below_minimum"
    UNKNOWN = "unknown"


class Party(StrEnum):
    """Who can do something about a break."""

    CLIENT = "client"
    TEMPLATE = "template"
    GATEWAY = "gateway"  # this service: gateway, engines and caches
    NOBODY = "nobody"


_PARTIES = {
    BreakKind.TEMPLATE_CHANGED: Party.TEMPLATE,
    BreakKind.ECHO_TEMPLATE: Party.TEMPLATE,
    BreakKind.EXPIRED: Party.GATEWAY,
    BreakKind.EVICTED: Party.GATEWAY,
    BreakKind.ROUTED_ELSEWHERE: Party.GATEWAY,
    BreakKind.RESTARTED: Party.GATEWAY,
    BreakKind.BELOW_MINIMUM: Party.NOBODY,
    BreakKind.UNKNOWN: Party.NOBODY,
}


BESIDE_THE_PROMPT: Final = frozenset({BreakKind.CACHE_CONTROL, BreakKind.SPELLING, BreakKind.PARAMS_CHANGED})
"""Changes that most prompts do not show: they lose nothing unless something was lost and nothing else explains it."""


def party_of(kind: BreakKind) -> Party:
    """Who broke it."""
    return _PARTIES.get(kind, Party.CLIENT)


class Comparison(StrEnum):
    """What came of comparing a step's request with the one that it continues."""

    FIRST = "first"  # it continues none
    UNSEEN = "unseen"  # the former request's text is not at hand any more
    APPENDED = "appended"  # it says what the former said, and goes on
    SHORTENED = "shortened"  # it says a beginning of what the former said, and goes on from there
    CHANGED = "changed"  # something that the former said stands otherwise now


@dataclass(frozen=True, slots=True)
class PromptChange:
    """The first difference between a request and the one that it continues.

    ``path`` is the member in the request as the client sent it (``messages[3].content``); ``start`` to ``end`` are the
    characters of the member's new value that stand where ``before_start`` to ``before_end`` of its former value stood:
    of the text where it is text, of its JSON otherwise. For dates, counters and identifiers they hold the whole of it.
    """

    kind: BreakKind
    section: str  # "model", "params", "tools", "system", "messages[3]"
    path: str
    start: int
    end: int
    before_start: int
    before_end: int
    before_hash: str  # of the whole former value, 16 hex digits; empty where there was none
    after_hash: str
    kept_chars: int  # of the prompt's text, in front of the difference
    repeated_chars: int  # behind it, what the former request had said as well
    total_chars: int
    before: str | None = None  # an excerpt, where the content policy allows words
    after: str | None = None
    also: tuple[str, ...] = ()  # other members that differ; a few


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What it takes to ask the same again."""

    model: str = ""  # as the instance names it
    weights_id: str | None = None
    engine: str | None = None  # kind of engine, and its build
    instance: str | None = None
    template: str | None = None  # what the gateway renders prompts with: its name and a digest
    seed: int | None = None
    sampling: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    prompt_digest: str | None = None  # of the request's prompt members as they were sent
    tools_digest: str | None = None
    system_digest: str | None = None


@dataclass(frozen=True, slots=True)
class StepDetail:
    """One step's detail. ``differs``: members of :class:`Reproduction` that are others than in the step before."""

    request_id: str
    comparison: Comparison
    reproduction: Reproduction = field(default_factory=Reproduction)
    previous_request_id: str | None = None
    change: PromptChange | None = None
    differs: tuple[str, ...] = ()


_DECODER = msgspec.json.Decoder(StepDetail)


def encode_detail(detail: StepDetail) -> bytes:
    """Return the detail as JSON."""
    return msgspec.json.encode(detail)


def decode_detail(body: bytes) -> StepDetail:
    """Return the detail of a JSON text; unknown members are ignored."""
    return _DECODER.decode(body)
