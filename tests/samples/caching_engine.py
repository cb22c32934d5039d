"""A scripted engine that counts a chat's tokens with the real tokenizer and caches them in blocks, as engines do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from engine_adapter.prompt import PromptEncoder
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer, usage

Json = dict[str, Any]
BLOCK = 16


class CachingEngine(ScriptedEngine):
    """Answers with the next of ``answers`` (or a tool call for ever), and reports what it had of each prompt."""

    def __init__(self, encoder: PromptEncoder, **more: Any) -> None:
        super().__init__(**more)
        self._encoder = encoder
        self.blocks: set[tuple[int, ...]] = set()
        self.answers: list[Json] = []
        self.calls = 0
        self.name_calls: Callable[[int], str] = lambda number: f"call_{number:04d}{id(self):x}"
        self.script_for = self._reply

    def evict(self) -> None:
        """Lose every block."""
        self.blocks.clear()

    def _reply(self, asked: Asked) -> Script:
        body = asked.json
        ids = tuple(self.rendered(body))
        cached = self._serve(ids, body)
        self.calls += 1
        message = self.answers.pop(0) if self.answers else self._call()
        output = self._add(ids, message, body)
        whole = answer("", len(ids), output, cached)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        whole["choices"][0] |= {"message": {"role": "assistant", **message}, "finish_reason": finish}
        return Script(body={**whole, "usage": usage(len(ids), output, cached)})

    def _call(self) -> Json:
        function = {"name": "look", "arguments": json.dumps({"q": f"item {self.calls}"})}
        call = {"id": self.name_calls(self.calls), "type": "function", "function": function}
        return {"content": None, "tool_calls": [call]}

    def rendered(self, body: Mapping[str, Any]) -> list[int]:
        """Return the prompt's ids."""
        return self._encoder.encode_chat(body["messages"], body.get("tools"))

    def _serve(self, ids: tuple[int, ...], body: Json) -> int:
        hits = 0
        for end in range(BLOCK, len(ids), BLOCK):
            if ids[:end] not in self.blocks:
                break
            hits = end
        return hits

    def _add(self, ids: tuple[int, ...], message: Mapping[str, Any], body: Json) -> int:
        """Keep a prompt's blocks; return how many tokens the answer has."""
        self.blocks |= {ids[:end] for end in range(BLOCK, len(ids) + 1, BLOCK)}
        return 30
