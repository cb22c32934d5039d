"""A request as the sections that its prompt is made of, kept as text, so that the next one can be held against it.

What is kept of a request is the text that came in (or that it was expanded to) and the places of its members: nothing
is copied, and nothing parsed until two requests turn out to differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec
from xxhash import xxh3_128

from gateway.diagnosis.difference import unsaid_members
from gateway.protocols.base import Ask

Json = object

TOOLS: Final = ("tools", "functions")
SYSTEM: Final = ("system", "instructions")
CONVERSATION: Final = ("messages", "input", "prompt")
RENDERING: Final = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "lora_path",
    "lora",
    "adapter",
    "model_version",
)
"""Parameters that are sure to change what comes of a conversation."""
NAMESPACE: Final = ("cache_salt",)
PARAMS: Final = (
    "tool_choice", "parallel_tool_calls", "response_format", "text", "output_config", "output_format", "thinking",
    "reasoning", "reasoning_effort", "add_generation_prompt", "continue_final_message",
)  # fmt: skip
"""Parameters that some chat templates read."""
SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "seed", "logit_bias",
)  # fmt: skip
_KEPT: Final = frozenset(("model", *TOOLS, *SYSTEM, *CONVERSATION, *RENDERING, *NAMESPACE, *PARAMS))
_SYSTEM_ROLES: Final = ("system", "developer")
_sorted = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class Kept:
    """A request that ended: its text, where its members stand in it, and the answer that it was given."""

    request_id: str
    text: str
    places: Mapping[str, tuple[int, int]]
    answer: Mapping[str, object] | None = None

    @property
    def cost_bytes(self) -> int:
        """About what it takes in memory."""
        return len(self.text) + 2_000

    def member(self, name: str) -> str | None:
        """Return a member's JSON text."""
        place = self.places.get(name)
        return None if place is None else self.text[place[0] : place[1]]

    def value(self, name: str) -> Json:
        """Return a member's value, ``None`` where there is none. O(member)."""
        text = self.member(name)
        return None if text is None else json.loads(text)

    def conversation_name(self) -> str | None:
        """Return which member holds the conversation."""
        return next((name for name in CONVERSATION if name in self.places), None)

    def conversation(self) -> list[Json]:
        """Return the conversation's messages or items; a text is one message of the user. O(conversation)."""
        name = self.conversation_name()
        value = None if name is None else self.value(name)
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        return value if isinstance(value, list) else []


def keep(request_id: str, ask: Ask, answer: Mapping[str, object] | None) -> Kept:
    """Return what to keep of a request. Cost: a few µs."""
    form = (ask.native or ask.translated).form
    places = {m.name: (m.start, m.end) for m in form.members if m.name in _KEPT}
    return Kept(request_id, form.text, places, answer)


def goes_on(former: Kept, latter: Kept) -> bool:
    """Tell whether everything that the former said stands at the latter's beginning, byte for byte. O(text), no copy
    of the conversation."""
    if any(former.member(member) != latter.member(member) for member in _KEPT - frozenset(CONVERSATION)):
        return False
    name = former.conversation_name()
    if name is None or name != latter.conversation_name():
        return False
    text, other = former.member(name), latter.places[name]
    assert text is not None
    if not text.endswith("]"):
        return latter.member(name) == text
    head = text[:-1].rstrip()
    if not latter.text.startswith(head, other[0], other[1]):
        return False
    rest = latter.text[other[0] + len(head) : other[1]].lstrip()
    return rest[:1] in ("]", ",") or head == "["


def is_system(message: Json) -> bool:
    """Tell whether a message is the system's."""
    return isinstance(message, Mapping) and message.get("role") in _SYSTEM_ROLES


def without_markers(value: Json) -> Json:
    """Return a value without what no prompt shows of it. O(value)."""
    if isinstance(value, Mapping):
        unsaid = unsaid_members(value)
        return {name: without_markers(inner) for name, inner in value.items() if name not in unsaid}
    if isinstance(value, list):
        return [without_markers(inner) for inner in value]
    return value


def weight(value: Json) -> int:
    """Return how many characters a value has as JSON. O(value)."""
    return len(msgspec.json.encode(value))


def name_of(value: Json) -> bytes:
    """Return what a value is known by, whatever the order of its members, without cache markers."""
    return blake2b(_sorted.encode(without_markers(value)), digest_size=8).digest()


def digest(text: str) -> str:
    """Return 16 hex digits that stand for a text.

    A history is hundreds of kilobytes at every step, and a cryptographic hash of all of it ten times the time: so one
    is made of a fast one.
    """
    return blake2b(xxh3_128(text.encode("utf-8", "surrogatepass")).digest(), digest_size=8).hexdigest()


def digest_of(kept: Kept, names: Sequence[str]) -> str | None:
    """Return a digest, made as ``digest``, of some members as they were sent; ``None`` where there are none of them."""
    hasher, is_any = xxh3_128(), False
    for name in names:
        if (text := kept.member(name)) is not None:
            is_any = True
            hasher.update(f"{name} {len(text)} ".encode())
            hasher.update(text.encode("utf-8", "surrogatepass"))
    return blake2b(hasher.digest(), digest_size=8).hexdigest() if is_any else None
