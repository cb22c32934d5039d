"""A tool-calling agent whose client parses each call and prints it anew, on a gateway with an embedded engine."""

from __future__ import annotations

import json
from typing import Any

from engine_adapter.event_socket import EventSocket
from tests.gateways import Client
from tracing.record import RequestRecord

MODEL = "SmolLM2-135M-Instruct"
Json = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book_stock",
            "description": "Book a movement of stock.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "enum": ["oak table", "desk lamp", "office chair", "café stool"]},
                    "note": {"type": "string", "enum": ["from the north warehouse to the shop in the old town"]},
                    "count": {"type": "integer", "minimum": 10, "maximum": 99},
                    "urgent": {"type": "boolean"},
                },
                "required": ["item", "note", "count", "urgent"],
                "additionalProperties": False,
            },
        },
    }
]


async def settled(client: Client) -> None:
    """Wait until the index holds everything that the engine has published."""
    instance = client.gateway.fleet.instances["embedded-0"]
    assert instance.facts is not None
    (source,), feed = instance.facts.event_sources, instance.feed
    assert feed is not None
    published = await EventSocket(source.endpoint, source.replay_endpoint).replay(0)
    assert published is not None
    assert published.last is not None
    last = published.last
    await client.until(lambda: feed.next_sequence is not None and feed.next_sequence > last)


def spelled_anew(message: Json) -> Json:
    """Return the message as a client sends it back that parses calls and prints them again, in its own way."""
    calls = [
        {
            **call,
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1, sort_keys=True),
            },
        }
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": message.get("content"), "tool_calls": calls}


async def run_agent(client: Client, name: str, *, steps: int, stream: bool = False) -> list[RequestRecord]:
    """Take some steps, each a forced call and its result, in a cache of their own; return their records."""
    messages: list[Json] = [
        {"role": "system", "content": "You keep the books of a warehouse."},
        {"role": "user", "content": "Book what was moved today, one movement a call."},
    ]
    records: list[RequestRecord] = []
    for step in range(steps):
        body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        more = {"temperature": 0.8, "seed": step, "max_tokens": 120, "cache_salt": name, "stream": stream}
        async with client.chat({"x-keepwarm-run": name}, model=MODEL, **body, **more) as response:
            assert response.status == 200, await response.text()
            request_id = response.headers["x-keepwarm-request-id"]
            message = joined(await response.text()) if stream else told(await response.json())
        records.append(await client.record(request_id))
        messages = [*messages, spelled_anew(message), result_of(message, step)]
        await settled(client)
    return records


def told(answer: Json) -> Json:
    """Return an answer's message; nothing that was asked for on the client's behalf may show."""
    assert "sglext" not in answer
    message: Json = answer["choices"][0]["message"]
    return message


def joined(stream: str) -> Json:
    """Return the message of a stream."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert all(chunk["choices"] and "sglext" not in chunk and chunk.get("usage") is None for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls") or ()]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    function = {"name": calls[0]["function"]["name"], "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": calls[0]["id"], "type": "function", "function": function}]}


def result_of(message: Json, step: int) -> Json:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"Booked as movement {step}."}
