"""What tells a sub-agent's first request: a call that its parent's model made, whose words it begins with. Pure.

A model asks for a sub-agent by a tool (``Task``, ``agent``, ``delegate_to_researcher``), whose argument is the task;
the program then begins a conversation in which the task is a user's first words. Both are known by digests only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from tracing.messages import DIGEST_BYTES

TASK_TOOL: Final = re.compile(r"(?i)(^|[^a-z])((sub)?agents?|tasks?)([^a-z]|$)|delegate|handoff|spawn")
"""Names of tools that begin a sub-agent."""

Task = tuple[int, bytes]
"""What a task is known by: how long it is, and a digest of it."""

MAX_TASKS: Final = 32
_LEAST_END_CHARS: Final = 5
MAX_PARTS: Final = 16
_decoder = msgspec.json.Decoder()


def tasks_of(message: Mapping[str, object] | None) -> dict[Task, list[str]]:
    """Return of an answer the ids of the calls for sub-agents, by what each of their arguments says.

    ``message``: as a client would send it back. Cost: a look at each call's name.
    """
    calls = message.get("tool_calls") if message is not None else None
    found: dict[Task, list[str]] = {}
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not TASK_TOOL.search(str(function.get("name"))):
            continue
        for text in _texts(function.get("arguments")):
            ids = found.setdefault(_name(text), [])
            if call.get("id") not in ids:
                ids.append(str(call.get("id") or ""))
        if len(found) > MAX_TASKS:
            break
    return found


def openings(messages: Sequence[Mapping[str, object]], lengths: Iterable[int]) -> Iterator[Task]:
    """Yield as what the user's first words may be somebody's task: the ends of each text, in these lengths.

    Programs put words of their own in front of a task, into the same message or the same text, and some a whole
    exchange that nobody had ("Here is the folder …", "Got it."): behind that, the task is what was said last.
    """
    wanted = sorted(lengths, reverse=True)
    has_answer = any(message.get("role") == "assistant" for message in messages)
    asked = messages[-1:] if has_answer else messages
    for message in [message for message in asked if message.get("role") == "user"][:2]:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [_text(part) for part in _parts(content)]
        texts = [text for text in parts[:MAX_PARTS] if text]
        for text in reversed(texts):
            stripped = text.strip()
            for length in wanted:
                if length == len(stripped) or _LEAST_END_CHARS <= length < len(stripped):
                    yield _name(stripped[-length:])


def _texts(arguments: object) -> Iterable[str]:
    if not isinstance(arguments, str):
        return ()
    try:
        values = _decoder.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(values, Mapping):
        return ()
    return [value for value in values.values() if isinstance(value, str) and value.strip()]


def _parts(content: object) -> Sequence[object]:
    return content if isinstance(content, list) else ()


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else ""


def _name(text: str) -> Task:
    stripped = text.strip()
    return len(stripped), blake2b(stripped.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
