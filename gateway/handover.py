"""What the engine that computed a prompt counted of it, put into the answer of the one that decoded.

Only the prefilling engine knows what of the prompt it had already; the decoding one takes all of it for fetched, or for
new. Only the decoding one knows what was generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from engine_adapter.base import EngineAdapter
from gateway.protocols.counting import engine_usage
from gateway.protocols.decode import json_object
from gateway.protocols.sse import data_of, with_data
from tracing.record import Usage

_PROMPT_MEMBERS = ("prompt_tokens", "prompt_tokens_details")

Json = dict[str, object]


class PromptCounts:
    """The counts of one prompt. ``told`` may come while the answer's stream is under way, as long as it precedes its
    usage."""

    def __init__(self, adapter: EngineAdapter) -> None:
        """``adapter``: of the prefilling engine."""
        self._adapter = adapter
        self._usage: Json | None = None
        self._private: Mapping[str, object] = {}

    def told(self, answer: Mapping[str, object]) -> None:
        """Take the prefilling engine's answer."""
        parts = self._adapter.read_usage(answer)
        if parts is not None and parts.usage is not None:
            self._usage = {name: parts.usage[name] for name in _PROMPT_MEMBERS if name in parts.usage}
            self._private = {name: answer[name] for name in self._adapter.private_members if name in answer}

    def prompt_usage(self) -> Usage | None:
        """Return what the prefilling engine counted of the prompt, once it has; no output."""
        if self._usage is None:
            return None
        parts = self._adapter.read_usage(self._private)
        extension = parts.extension if parts is not None else None
        return engine_usage(self._adapter, {**self._usage, "completion_tokens": 0}, extension)

    def __call__(self, event: bytes) -> Sequence[bytes]:
        """Return an event of the decoding engine's stream, with these counts where it counts."""
        data = data_of(event) if b'"usage"' in event else None
        chunk = json_object(data) if data is not None else None
        if chunk is None or not self._put(chunk):
            return (event,)
        return (with_data(event, msgspec.json.encode(chunk)),)

    def answer(self, body: bytes) -> bytes:
        """Return the decoding engine's whole answer with these counts."""
        answer = json_object(body)
        return msgspec.json.encode(answer) if answer is not None and self._put(answer) else body

    def _put(self, answer: Json) -> bool:
        usage = answer.get("usage")
        if not isinstance(usage, dict) or self._usage is None:
            return False
        whole = {**usage, **self._usage}
        prompt, output = whole.get("prompt_tokens"), whole.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(output, int):
            whole["total_tokens"] = prompt + output
        answer["usage"] = whole
        for name in self._adapter.private_members:
            answer.pop(name, None)
        answer.update(self._private)
        return True
