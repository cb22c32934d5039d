"""Answers as Responses: the object that echoes its request, output items, and usage as this API counts it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.protocols.answer import Block, Kind
from gateway.protocols.base import Answering
from gateway.protocols.responses.custom_tools import CUSTOM, CUSTOM_CALL, input_of
from gateway.protocols.responses.tools import own_names
from gateway.protocols.translated import Finish
from tracing.record import Usage

Json = dict[str, object]

_ECHOED: Mapping[str, object] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Members of a response that repeat its request, and what they are where it left them out."""


@dataclass(frozen=True, slots=True)
class Echo:
    """What a response repeats of its request, and its names."""

    answering: Answering
    values: Mapping[str, object]  # the request's members
    tools: Sequence[Mapping[str, object]]  # all that it and its conversation give

    @property
    def response_id(self) -> str:
        """The response's id."""
        return f"resp_{self._stem}"

    @property
    def _stem(self) -> str:
        return self.answering.request_id.removeprefix("req-")

    def called(self, block: Block) -> Mapping[str, object]:
        """Return the type and name of a called tool, and its namespace if it has one."""
        return own_names(self.tools, block.name)

    def item_id(self, block: Block, index: int) -> str:
        """Return an output item's id."""
        return f"{_PREFIXES[block.kind]}_{self._stem}_{index}"


_PREFIXES = {Kind.TEXT: "msg", Kind.REFUSAL: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}


def response(echo: Echo, status: str, output: Sequence[Json] = (), usage: Usage | None = None, **more: object) -> Json:
    """Return a response object in this state."""
    answering, values = echo.answering, echo.values
    echoed = {name: default if values.get(name) is None else values[name] for name, default in _ECHOED.items()}
    return {
        "id": echo.response_id,
        "object": "response",
        "created_at": answering.created_s,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": answering.model,
        "output": list(output),
        "usage": None if usage is None else usage_of(usage),
        **echoed,
        **more,
    }


def finished(echo: Echo, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> Json:
    """Return the response of a whole answer. One that met its limit, or was filtered, is ``incomplete``."""
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(finish.reason or "")
    status = "completed" if reason is None else "incomplete"
    output = [item(echo, block, index, _status(block, index, blocks, reason)) for index, block in enumerate(blocks)]
    details = None if reason is None else {"reason": reason}
    ended = {"completed_at": max(int(time.time()), echo.answering.created_s)} if reason is None else {}
    return response(echo, status, output, usage, incomplete_details=details, **ended)


def _status(block: Block, index: int, blocks: Sequence[Block], reason: str | None) -> str:
    return "incomplete" if reason is not None and index == len(blocks) - 1 else "completed"


def item(echo: Echo, block: Block, index: int, status: str = "completed") -> Json:
    """Return a block as an output item."""
    head: Json = {"id": echo.item_id(block, index), "status": status}
    if block.kind is Kind.CALL:
        head |= {"call_id": block.call_id, **echo.called(block)}
        if head["type"] == CUSTOM:
            return {**head, "type": CUSTOM_CALL, "input": input_of(block.text)}
        return {**head, "type": "function_call", "arguments": block.text}
    if block.kind is Kind.REASONING:
        return {"type": "reasoning", **head, "summary": [], "content": [part(block)]}
    return {"type": "message", **head, "role": "assistant", "content": [part(block)]}


def opened_item(echo: Echo, block: Block, index: int) -> Json:
    """Return an output item as it begins in a stream."""
    begun = item(echo, Block(block.kind, block.call_id, block.name), index, "in_progress")
    return begun | ({} if block.kind is Kind.CALL else {"content": []})


def part(block: Block, *, is_empty: bool = False) -> Json:
    """Return a block's content part."""
    text = "" if is_empty else block.text
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    if block.kind is Kind.REFUSAL:
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if is_empty else block.logprobs}


def usage_of(usage: Usage) -> Json:
    """Return counts as this API tells them: cached and written tokens inside the input, reasoning inside the output."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.hit_tokens, "cache_write_tokens": usage.written_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
