"""Agents on the official clients that change one thing of what they send, at one step, as careless programs do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

Json = dict[str, Any]
Fault = Callable[[Json, int], None]
"""Changes the arguments of a client's call at a step."""

STEPS = 4
FAULTY = 3  # the step with the fault
HEAD = "You are careful. Today is "
STAMP = "2026-11-30T08:15:42Z"
UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
RULES = " ".join(f"Rule {n}: answer the question, look things up when unsure, and cite item {n}." for n in range(40))
ASKED = "What is item 7? " + "Be exact. " * 30


class Agent(Protocol):
    """One agent run."""

    request_ids: list[str]

    async def step(self, fault: Callable[[Json], None] | None = None) -> None:
        """Ask the model with everything said so far, changed by the fault for good; note its answer and a result."""


@dataclass
class OpenAIAgent:
    """A tool loop over Chat Completions."""

    client: AsyncOpenAI
    run: str
    model: str = "m"

    def __post_init__(self) -> None:
        self.request_ids: list[str] = []
        self.number = 0
        tools = [_openai_tool(name, self.run) for name in ("look", "find", "count")]
        system = {"role": "system", "content": f"{HEAD}{STAMP}, request {UUID}. {RULES}"}
        self.call: Json = {
            "model": self.model,
            "messages": [system, {"role": "user", "content": f"{ASKED}{self.run}"}],
            "tools": tools,
        }

    async def step(self, fault: Callable[[Json], None] | None = None) -> None:
        self.number += 1
        if fault is not None:
            fault(self.call)
        raw = await self.client.chat.completions.with_raw_response.create(
            **copy.deepcopy(self.call), extra_headers={"x-keepwarm-run": self.run}
        )
        self.request_ids.append(raw.headers["x-keepwarm-request-id"])
        message = raw.parse().choices[0].message.model_dump(exclude_none=True)
        self.call["messages"].append(message)
        ids = [call["id"] for call in message.get("tool_calls") or []]
        said = _result(self.number)
        self.call["messages"] += [{"role": "tool", "tool_call_id": id_, "content": said} for id_ in ids]
        if not ids:
            self.call["messages"].append({"role": "user", "content": said})


@dataclass
class AnthropicAgent:
    """A tool loop over Messages; it marks its system prompt and, where ``marks``, its last message for the cache."""

    client: AsyncAnthropic
    run: str
    model: str = "m"
    marks: bool = False

    def __post_init__(self) -> None:
        self.request_ids: list[str] = []
        self.number = 0
        self.call: Json = {
            "model": self.model,
            "max_tokens": 500,
            "system": [
                {
                    "type": "text",
                    "text": f"{HEAD}{STAMP}, request {UUID}. {RULES}",
                    "cache_control": {"type": "ephemeral"},
                }
            ],
            "messages": [{"role": "user", "content": [{"type": "text", "text": f"{ASKED}{self.run}"}]}],
            "tools": [_anthropic_tool(name, self.run) for name in ("look", "find", "count")],
        }

    async def step(self, fault: Callable[[Json], None] | None = None) -> None:
        self.number += 1
        if fault is not None:
            fault(self.call)
        for message in self.call["messages"]:
            message["content"][-1].pop("cache_control", None)
        if self.marks:
            self.call["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        raw = await self.client.messages.with_raw_response.create(
            **copy.deepcopy(self.call), extra_headers={"x-keepwarm-run": self.run}
        )
        self.request_ids.append(raw.headers["x-keepwarm-request-id"])
        content = [block.model_dump(exclude_none=True) for block in (await raw.parse()).content]
        self.call["messages"].append({"role": "assistant", "content": content})
        said = _result(self.number)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": said}
            for block in content
            if block["type"] == "tool_use"
        ]
        self.call["messages"].append({"role": "user", "content": results or [{"type": "text", "text": said}]})


def _result(number: int) -> str:
    return f"Result of step {number}: " + "found in the archive. " * 20


def _schema(run: str) -> Json:
    """No run shares a prefix with another's."""
    text = "Looks something up."
    return {"type": "object", "title": run, "properties": {"q": {"type": "string", "description": text}}}


def _openai_tool(name: str, run: str) -> Json:
    return {
        "type": "function",
        "function": {"name": name, "description": "Looks something up.", "parameters": _schema(run)},
    }


def _anthropic_tool(name: str, run: str) -> Json:
    return {"name": name, "description": "Looks something up.", "input_schema": _schema(run)}
