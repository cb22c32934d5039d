"""Answers as Messages: content blocks, stop reasons, and usage as this API counts it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gateway.protocols.answer import Block, Kind
from gateway.protocols.anthropic.request import INVALID_JSON
from gateway.protocols.base import Answering
from gateway.protocols.translated import Finish
from tracing.record import Usage

Json = dict[str, object]

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use",
            "content_filter": "refusal"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """What of an answer a client gets, and under which names."""

    answering: Answering
    thinking: bool = True

    @property
    def message_id(self) -> str:
        """The message's id."""
        return "msg_" + self.answering.request_id.removeprefix("req-")


def message(shown: Shown, blocks: Sequence[Block], finish: Finish, usage: Usage | None) -> Json:
    """Return a whole message."""
    content = [content_block(block) for block in blocks if is_shown(block, shown)]
    return {**_envelope(shown), "content": content, **stop_of(blocks, finish), "usage": usage_of(usage)}


def opening(shown: Shown) -> Json:
    """Return the message as a stream begins it, with the gateway's count of the prompt: no engine told one yet."""
    answering = shown.answering
    hits = answering.hit_tokens
    counted = Usage(fresh_tokens=max((answering.prompt_tokens or 0) - hits, 0), hit_unknown_tokens=hits)
    nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    return {**_envelope(shown), **nothing, "usage": usage_of(counted)}


def _envelope(shown: Shown) -> Json:
    return {"id": shown.message_id, "type": "message", "role": "assistant", "model": shown.answering.model}


def is_shown(block: Block, shown: Shown) -> bool:
    """Tell whether the client gets the block."""
    return shown.thinking or block.kind is not Kind.REASONING


def content_block(block: Block) -> Json:
    """Return a whole block."""
    if block.kind is Kind.CALL:
        return {**opened_block(block), "input": _input(block.text)}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": signature(block)}
    return {"type": "text", "text": block.text}


def opened_block(block: Block) -> Json:
    """Return a block as it begins in a stream."""
    if block.kind is Kind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def signature(block: Block) -> str:
    """Return a thinking block's signature. Clients want one and send it back; nothing here rests on it."""
    return base64.b64encode(hashlib.blake2b(block.text.encode(), digest_size=24).digest()).decode()


def stop_of(blocks: Sequence[Block], finish: Finish) -> Json:
    """Return why the answer ended."""
    if finish.reason == "stop" and finish.matched_stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched_stop}
    reason = None if finish.reason is None else _REASONS.get(finish.reason, "end_turn")  # engines have own words, too
    if reason == "end_turn" and any(block.kind is Kind.CALL for block in blocks):  # some say so
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(usage: Usage | None) -> Json:
    """Return counts as this API tells them: fresh, read and written tokens beside one another, never one in another."""
    usage = usage or Usage()
    five_minutes = usage.write_tokens + usage.write_5m_tokens  # five minutes are this API's default
    return {
        "input_tokens": usage.fresh_tokens,
        "cache_creation_input_tokens": usage.written_tokens,
        "cache_read_input_tokens": usage.hit_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": five_minutes,
            "ephemeral_1h_input_tokens": usage.write_1h_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _input(arguments: str) -> Mapping[str, object]:
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
