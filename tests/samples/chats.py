"""Random conversations for prompts: every shape that a client may send, and text that tokenizers find hard."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

PIECES = (
    "hello", " world", "\n", "\n\n", "  ", "   ", "\t", "\r\n", "你好，世界", "日本語のテキスト", "한국어", "🤣👩‍👩‍👧",
    "é", "ü", "e\u0301", "ﬁ", "0123456789", "3.14", "<b>", "</p>", "'s", "don't", "\u00a0", "\u200b", "\u3000", "`x`",
    "def f(x):\n    return x", "$$", "…", "–", "العربية", "हिन्दी", "𝔘𝔫𝔦", "\ufeff", "ab" * 9, "...", "!!!!", " \n \n",
)  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <b>two</b> & more",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "list_all",
            "description": "lists “things”",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def text(chance: random.Random, most: int = 8) -> str:
    """Return a text; it may be empty, and begin or end with white space."""
    return "".join(chance.choice(PIECES) for _ in range(chance.randrange(most)))


def parts(chance: random.Random) -> list[dict[str, Any]]:
    """Return a text in parts."""
    return [{"type": "text", "text": text(chance)} for _ in range(chance.randint(1, 3))]


def call(chance: random.Random, number: int) -> dict[str, Any]:
    """Return a tool call as clients send it: its arguments are a string of JSON, spelled somehow."""
    spelling = chance.choice([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
    arguments = json.dumps({"a": chance.randrange(99), "b": text(chance, 3)}, **spelling)
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": chance.choice(["add", "list_all"]), "arguments": arguments},
    }


def conversation(
    chance: random.Random,
    *,
    turns: int,
    calls: bool,
    reasoning: bool = False,
    null_content: bool = True,
    in_parts: bool = False,
    ends_with: Sequence[str] = ("user", "tool"),
) -> list[dict[str, Any]]:
    """Return a conversation in which roles follow one another as templates want it."""
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.6:
        messages.append({"role": "system", "content": text(chance) or "s"})
    messages.append({"role": "user", "content": "q" + text(chance)})
    for number in range(turns):
        if calls and chance.random() < 0.6:
            made = [call(chance, 10 * number + at) for at in range(chance.randint(1, 2))]
            content = None if null_content and chance.random() < 0.7 else ""
            messages.append({"role": "assistant", "content": content, "tool_calls": made})
            if reasoning and chance.random() < 0.5:
                messages[-1]["reasoning_content"] = text(chance)
            for one in made:
                result = chance.choice([text(chance), '{"x": [1,2.50]}', "42", "null"])
                name = one["function"]["name"]
                messages.append({"role": "tool", "tool_call_id": one["id"], "name": name, "content": result})
            if chance.random() < 0.5:
                continue
        messages.append({"role": "assistant", "content": "a" + text(chance)})
        if reasoning and chance.random() < 0.5:
            messages[-1]["reasoning"] = text(chance)
        elif reasoning and chance.random() < 0.3:
            messages[-1]["content"] = f"<think>\n{text(chance)}\n</think>\n\n{messages[-1]['content']}"
        messages.append({"role": "user", "content": "u" + text(chance)})
    while messages[-1]["role"] not in ends_with:
        messages.pop()
    if in_parts:
        for message in messages:
            if message["role"] in ("user", "tool") and chance.random() < 0.7:
                message["content"] = parts(chance)
    return messages
