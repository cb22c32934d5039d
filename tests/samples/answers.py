"""What engines say in chat completions: pieces of streams, and the same answers whole."""

from __future__ import annotations

from collections.abc import Sequence

from tests.scripted_engine import DONE, Json, chunk, event, usage, usage_chunk


def call_piece(index: int, *, arguments: str = "", **more: object) -> Json:
    """Return a delta with a piece of a tool call; ``id`` and ``name`` begin one."""
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"tool_calls": [{"index": index, "type": "function", "function": {**name, "arguments": arguments}, **more}]}


def streamed(
    deltas: Sequence[Json], finish: str = "stop", *, prompt: int = 10, cached: int = 0, **more: object
) -> list[bytes]:
    """Return a stream of these deltas; ``more`` stands beside the finish reason."""
    last = chunk({}, finish=finish)
    last["choices"][0] |= more
    output = len(deltas)
    return [
        event(chunk({"role": "assistant", "content": ""})),
        *(event(chunk(delta)) for delta in deltas),
        event(last),
        event(usage_chunk(prompt, output, cached)),
        DONE,
    ]


def whole(
    message: Json, finish: str = "stop", *, prompt: int = 10, output: int = 4, cached: int = 0, **more: object
) -> Json:
    """Return a completion with this message; ``more`` stands beside the finish reason."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **more}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return {**body, "usage": usage(prompt, output, cached)}


THOUGHT_AND_TWO_CALLS: Sequence[Json] = (
    {"reasoning_content": "Two "},
    {"reasoning_content": "look-ups."},
    {"content": "I look "},
    {"content": "both up. 世界🌍"},
    call_piece(0, id="call_a", name="look", arguments=""),
    call_piece(0, arguments='{"x":'),
    call_piece(1, id="call_b", name="find", arguments='{"y": '),  # before the first one is whole
    call_piece(0, arguments=" 1}"),
    call_piece(1, arguments='"Grüße"}'),
)
"""Reasoning, text, and two calls whose pieces come mixed."""

THOUGHT_AND_TWO_CALLS_WHOLE: Json = {
    "reasoning_content": "Two look-ups.",
    "content": "I look both up. 世界🌍",
    "tool_calls": [
        {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "find", "arguments": '{"y": "Grüße"}'}},
    ],
}
