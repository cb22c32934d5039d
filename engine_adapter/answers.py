"""Answers: what a model generated, by the prompt that it was given to, and the messages in which clients quote it."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from threading import Lock
from typing import Protocol

import msgspec

from engine_adapter.ids import Ids

MAX_ALTERNATIVES = 8
"""How many answers to the same prompt are told apart; the oldest is forgotten first."""

_ENTRY_BYTES = 600  # an answer's objects beside its ids, and its slots in two dictionaries
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_canonical = msgspec.json.Encoder(order="sorted")


class EchoState(StrEnum):
    """What became of the newest answer that a prompt quotes."""

    NONE = "none"  # it quotes none
    UNKNOWN = "unknown"  # whose ids nobody knows: they were not told, are forgotten, or it is someone else's answer
    SAME = "same"  # rendering makes the ids that were generated
    KEPT = "kept"  # rendering makes others; those that were generated stand in their place
    CHANGED = "changed"  # the client says something else than it was answered: reasoning left out, words edited
    TEMPLATE_REWRITES = "template_rewrites"  # the chat template writes something else than was generated


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's echo. The newest answer's ``won_tokens`` from ``kept_from`` on can hit only because they were kept.

    Older answers would hit as well, had each been rendered anew from its first quotation on. Where the answer is
    quoted otherwise than it was generated, ``lost_tokens`` of it are computed again.
    """

    state: EchoState = EchoState.NONE
    won_tokens: int = 0
    kept_from: int = 0
    lost_tokens: int = 0

    def won_of(self, hit_tokens: int) -> int:
        """Return how many of the leading ``hit_tokens`` are such tokens."""
        return max(min(hit_tokens - self.kept_from, self.won_tokens), 0)


NO_ECHO = Echo()


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated to a prompt. ``ids``: without the token that ended it."""

    message: bytes
    ids: Ids
    prompt_tokens: int
    prompt_digest: int


class Answers(Protocol):
    """What is known of a conversation's answers."""

    @property
    def owner(self) -> bytes:
        """Whose they are: prompts that hold generated ids are nobody else's."""

    def to(self, messages: int, scope: bytes) -> Sequence[Answer]:
        """Return the answers to the prompt of the first ``messages`` messages, the newest first."""


class AnswerMemo:
    """Answers by the prompt that they were given to. Thread-safe; the least recently used go at ``limit_bytes``."""

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._limit_bytes, self._used_bytes = limit_bytes, 0
        self._answers: OrderedDict[bytes, list[Answer]] = OrderedDict()
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        """Return about how much the answers take."""
        return self._used_bytes

    def to(self, prompt: bytes) -> Sequence[Answer]:
        """Return the answers to a prompt, by the name that it was remembered under, the newest first."""
        with self._lock:
            found = self._answers.get(prompt)
            if found is None:
                return ()
            self._answers.move_to_end(prompt)
            return found[::-1]

    def remember(self, prompt: bytes, answer: Answer) -> None:
        """Keep an answer; the same one again takes the place of the first."""
        with self._lock:
            known = self._answers.setdefault(prompt, [])
            self._answers.move_to_end(prompt)
            known[:] = [other for other in known if not self._is_replaced(other, answer)]
            known.append(answer)
            self._used_bytes += _cost(answer)
            for old in known[:-MAX_ALTERNATIVES]:
                self._used_bytes -= _cost(old)
            del known[:-MAX_ALTERNATIVES]
            while self._used_bytes > self._limit_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._used_bytes -= sum(map(_cost, dropped))

    def _is_replaced(self, old: Answer, new: Answer) -> bool:
        if (old.message, old.prompt_digest) != (new.message, new.prompt_digest):
            return False
        self._used_bytes -= _cost(old)
        return True


def _cost(answer: Answer) -> int:
    return _ENTRY_BYTES + answer.ids.nbytes


def prompt_name(owner: bytes, scope: bytes, messages: bytes) -> bytes:
    """Return the name of a prompt: whose it is, what it depends on beside its messages, and a digest of those."""
    return blake2b(b"".join((len(owner).to_bytes(4, "little"), owner, scope, messages)), digest_size=16).digest()


def message_digest(message: Mapping[str, object]) -> bytes | None:
    """Return a digest of what an assistant's message says; ``None`` where it holds what is not understood here.

    Text counts to the letter, calls by name and value, absent and empty alike. Ids of calls don't count: a template
    that writes them writes something that was not generated.
    """
    content = _text_of(message.get("content"))
    calls = message.get("tool_calls") or ()
    if content is None or not isinstance(calls, list | tuple):
        return None
    reasoning = next((message[name] for name in _REASONING if message.get(name)), "")
    spoken = [content, reasoning, [_call(call) for call in calls]]
    try:
        return blake2b(_canonical.encode(spoken), digest_size=16).digest()
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
        return None


def _text_of(content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and len(content) == 1 and isinstance(part := content[0], Mapping):
        text = part.get("text")
        return text if str(part.get("type")) in _TEXT_PARTS and isinstance(text, str) else None
    return "" if content == [] else None


def _call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = exactly(json.loads(arguments))
        except (ValueError, RecursionError):
            pass  # not JSON: it counts as the text that it is
    return [function.get("name"), arguments]


def exactly(value: object) -> object:
    """Return a JSON value in which 1, 1.0 and true differ, as they do in a prompt."""
    if isinstance(value, dict):
        return {name: exactly(item) for name, item in value.items()}
    if isinstance(value, list):
        return [exactly(item) for item in value]
    return [type(value).__name__, repr(value)] if isinstance(value, float | int) else value
