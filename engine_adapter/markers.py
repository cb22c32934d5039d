"""Markers: the tokens by which a chat template separates roles, and how content is kept from forging them.

A *control token* is an added token of the tokenizer that means something to the model: every one flagged special, and
every other that the template itself writes (runs of white space, which some tokenizers add, are ordinary text). The
rule is that of transformers' ``sanitize_control_tokens``.

Before rendering, each control token in a client's text is *guarded*: a private-use character, one that this request's
text does not contain, is put behind its first character. The rendered text then matches control tokens only where the
template wrote them. A guarded segment is encoded with control tokens taken as text, the guard removed.

Where an engine encodes the messages itself, *escaping* them is what is left: the same character in every text, one that
nobody sees (``ESCAPE``), which stays there.

An assistant's own text keeps unguarded those tags that are not special and look like ``<think>`` or ``</tool_call>``:
templates take answers apart at them, and they cannot fake a role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import cast

from engine_adapter.media import is_medium
from engine_adapter.prompt_errors import PromptError
from engine_adapter.substrings import Substrings

ESCAPE = "\u2060"
"""A word joiner: invisible, no place to break a line, and part of no control token."""

_PLAIN_TAG = re.compile(r"</?[A-Za-z_]+>")
_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0xFFFFD
_MOST_NESTED = 8
_NEVER = re.compile(r"(?!)")


class Markers:
    """The control tokens of one model under one template. Immutable, so safe for any thread."""

    def __init__(self, control_tokens: Mapping[str, bool]) -> None:
        """``control_tokens`` maps each token's text to whether it is flagged special."""
        texts = sorted(control_tokens, key=len, reverse=True)  # a token wins over the tokens that it contains
        self.tokens = frozenset(texts)
        self.splitter = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else _NEVER
        self._any = _Finder(texts)
        self.steering = [t for t in texts if control_tokens[t] or not _PLAIN_TAG.fullmatch(t)]
        """Those that an answer may not spell either."""
        self._untrusted_in_answers = _Finder(self.steering)

    def guard(self, messages: Sequence[Mapping[str, object]], mark: str) -> list[dict[str, object]]:
        """Return the messages with every control token in them guarded by ``mark``."""
        return [
            {
                key: self.guard_value(value, mark, answer=message.get("role") == "assistant" and key != "tool_calls")
                for key, value in message.items()
            }
            for message in messages
        ]

    def are_spelled_in(self, messages: Sequence[Mapping[str, object]], tools: object) -> bool:
        """Tell whether any text in the messages or tools spells a control token. O(text)."""
        return self.guard_value(tools, ESCAPE) != tools or any(
            self._escaped(message, times=1) != message for message in messages
        )

    def escape(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None
    ) -> tuple[list[dict[str, object]], list[dict[str, object]] | None]:
        """Return messages and tools that spell no control token: each has ``ESCAPE`` in it. Media stay as they are."""
        shown = cast("list[dict[str, object]] | None", self._guarded_often(tools, answer=False))
        return [self._escaped(message) for message in messages], shown

    def _escaped(self, message: Mapping[str, object], times: int = _MOST_NESTED) -> dict[str, object]:
        is_answer = message.get("role") == "assistant"
        escaped: dict[str, object] = {}
        for key, value in message.items():
            answer = is_answer and key != "tool_calls"
            if key == "content" and isinstance(value, list):
                escaped[key] = [
                    self._guarded_often(part, answer, times) if not is_medium(part) else part for part in value
                ]
            else:
                escaped[key] = self._guarded_often(value, answer, times)
        return escaped

    def _guarded_often(self, value: object, answer: bool, times: int = _MOST_NESTED) -> object:
        """Guard until nothing is found any more: of two tokens that overlap, the second is found the second time."""
        for _ in range(times):
            guarded = self.guard_value(value, ESCAPE, answer=answer)
            if guarded == value:
                break
            value = guarded
        return value

    def guard_value(self, value: object, mark: str, *, answer: bool = False) -> object:
        """Return ``value`` with each string in it guarded, keys of objects included."""
        if isinstance(value, str):
            return (self._untrusted_in_answers if answer else self._any).guard(value, mark)
        if type(value) is dict or isinstance(value, Mapping):
            return {
                self.guard_value(key, mark): self.guard_value(item, mark, answer=answer) for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.guard_value(item, mark, answer=answer) for item in value]
        return value


class _Finder:
    """Finds any of some strings."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = Substrings(texts)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else _NEVER

    def guard(self, text: str, mark: str) -> str:
        if not self._texts.may_be_in(text):
            return text
        return self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)


def unused_marks(values: object, count: int) -> list[str]:
    """Return ``count`` private-use characters that occur nowhere in ``values``.

    Raises ``PromptError`` where there are none left, which takes a text of 65,000 different private-use characters.
    """
    used: set[str] = set()
    _collect_private(values, used)
    free = (char for code in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1) if (char := chr(code)) not in used)
    found = list(islice(free, count))
    if len(found) < count:
        raise PromptError("the messages use every private-use character of Unicode")
    return found


def contains_any(values: object, marks: Sequence[str]) -> bool:
    """Tell whether any of these private-use characters occurs in ``values``."""
    used: set[str] = set()
    _collect_private(values, used)
    return not used.isdisjoint(marks)


_PRIVATE = re.compile(f"[{chr(_FIRST_PRIVATE)}-{chr(_LAST_PRIVATE)}]")


def _collect_private(value: object, used: set[str]) -> None:
    if isinstance(value, str):
        if not value.isascii():  # known from the string's header, so most texts cost nothing here
            used.update(_PRIVATE.findall(value))
    elif type(value) is dict or isinstance(value, Mapping):  # the first is a tenth of the second
        for key, item in value.items():
            _collect_private(key, used)
            _collect_private(item, used)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect_private(item, used)
