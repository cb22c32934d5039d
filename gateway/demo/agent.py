"""A tool-calling agent on the official OpenAI client.

A 135M-parameter model cannot be trusted to choose its tools, so each step forces one by ``tool_choice`` and lets the
model fill in the arguments under the tool's JSON schema. The calls are really run and their results really go back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from gateway.demo.desk import HANDBOOK, TASK, TOOLS, Desk

if TYPE_CHECKING:
    from openai import OpenAI, Stream
    from openai.types.chat import ChatCompletionChunk

Body = dict[str, Any]


class Agent:
    """One run: a growing conversation, one model call a step.

    ``bodies`` keeps every request as it was sent, so that a twin of it can be sent elsewhere.
    """

    def __init__(self, client: OpenAI, model: str, desk: Desk, run: str, say: Callable[[str], None]) -> None:
        self._client, self._model, self._desk, self._run, self._say = client, model, desk, run, say
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": HANDBOOK},
            {"role": "user", "content": TASK},
        ]
        self.bodies: list[Body] = []

    def ask(self, question: str) -> None:
        """Let the user say something before the next step."""
        self._messages.append({"role": "user", "content": question})

    def force(self, tool: str) -> None:
        """Run one step: the model fills in this tool's arguments, the tool runs, its result joins the conversation."""
        choice = {"type": "function", "function": {"name": tool}}
        body: Body = {"messages": list(self._messages), "tools": TOOLS, "tool_choice": choice, "max_tokens": 64}
        message = self._stream(body)
        self._messages.append(message)
        for call in message["tool_calls"]:
            result = self._desk.call(call["function"]["name"], call["function"]["arguments"])
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            self._say(f"{call['function']['name']}({call['function']['arguments']}) -> {result}")

    def answer(self, max_tokens: int = 32) -> None:
        """Run one step without tools being called: the model answers in its own words."""
        body: Body = {"messages": list(self._messages), "tools": TOOLS, "tool_choice": "none", "max_tokens": max_tokens}
        message = self._stream(body)
        self._messages.append(message)
        self._say(" ".join((message["content"] or "").split()))

    def _stream(self, body: Body) -> dict[str, Any]:
        """Send one request and put the streamed answer together as the message that goes into the history."""
        body = {"model": self._model, "stream": True, "temperature": 0, **body}
        self.bodies.append(body)
        text = ""
        calls: dict[int, dict[str, str]] = {}
        headers = {"x-keepwarm-run": self._run, "x-keepwarm-step-name": f"step-{len(self.bodies)}"}
        answer = self._client.chat.completions.create(**body, extra_headers=headers)
        for chunk in cast("Stream[ChatCompletionChunk]", answer):
            if not chunk.choices:
                continue
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                if part.function is not None:
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for _, c in sorted(calls.items())
            ]
        return message
