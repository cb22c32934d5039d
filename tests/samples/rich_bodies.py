"""Bodies that use every member that the gateway reads, one an endpoint, and what hostile clients put in its place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
Place = tuple[str | int, ...]

RICH_BODIES: dict[str, Json] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be"},
            {
                "role": "user",
                "name": "bob",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aWk=", "detail": "low"}},
                    {"type": "input_audio", "input_audio": {"data": "aWk=", "format": "wav"}},
                    {"type": "file", "file": {"file_data": "data:application/pdf;base64,aWk=", "filename": "a.pdf"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "t",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "d",
                    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
                    "strict": True,
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "top_p": 1,
        "n": 1,
        "stop": ["x"],
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"1": 2},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "user": "u",
        "metadata": {"a": "b"},
        "seed": 1,
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1},
        "cache_salt": "s",
        "prompt_cache_key": "k",
        "store": False,
    },
    "/v1/completions": {
        "prompt": ["hi", [1, 2]],
        "suffix": "x",
        "echo": True,
        "logprobs": 2,
        "n": 2,
        "best_of": 2,
        "max_tokens": 3,
        "stop": "x",
        "stream": False,
        "stream_options": {"include_usage": True},
        "user": "u",
        "logit_bias": {"5": 1},
        "seed": 1,
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "citations": []},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aWk="}},
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                        "title": "t",
                        "context": "c",
                        "citations": {"enabled": True},
                    },
                    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [
                            {"type": "text", "text": "r"},
                            {"type": "image", "source": {"type": "url", "url": "http://x/y"}},
                        ],
                        "is_error": True,
                    }
                ],
            },
        ],
        "tools": [
            {
                "name": "f",
                "description": "d",
                "input_schema": {"type": "object", "properties": {}},
                "type": "custom",
                "strict": True,
                "cache_control": {"type": "ephemeral"},
            }
        ],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "temperature": 1,
        "top_p": 1,
        "top_k": 3,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "u"},
        "stream": False,
        "service_tier": "auto",
        "container": None,
        "mcp_servers": [],
        "context_management": {"edits": []},
    },
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "x"},
                    {"type": "input_image", "image_url": "data:image/png;base64,aWk=", "detail": "low"},
                    {"type": "input_file", "file_data": "data:application/pdf;base64,aWk=", "filename": "f"},
                ],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "m",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "y", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "no"},
                ],
            },
            {
                "type": "reasoning",
                "id": "r",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "z"}],
                "encrypted_content": None,
            },
            {
                "type": "function_call",
                "id": "fc",
                "call_id": "c1",
                "name": "f",
                "arguments": "{}",
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r"}]},
        ],
        "instructions": "be",
        "tools": [
            {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "temperature": 1,
        "top_p": 1,
        "top_logprobs": 2,
        "text": {
            "format": {
                "type": "json_schema",
                "name": "n",
                "schema": {"type": "object"},
                "strict": True,
                "description": "d",
            },
            "verbosity": "low",
        },
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "store": True,
        "user": "u",
        "truncation": "disabled",
        "stream": False,
        "stream_options": {"include_obfuscation": False},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "background": False,
    },
    "/v1/embeddings": {"input": ["a", [1, 2]], "encoding_format": "float", "dimensions": 3, "user": "u"},
    "/tokenize": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "add_special_tokens": True,
        "add_generation_prompt": True,
        "return_token_strs": True,
    },
    "/v1/tokenize": {"prompt": "hi there", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "skip_special_tokens": True},
    "/v1/traces": {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "s"}}]},
                "scopeSpans": [
                    {
                        "scope": {},
                        "spans": [
                            {
                                "traceId": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                                "spanId": "bbbbbbbbbbbbbbbb",
                                "parentSpanId": "cccccccccccccccc",
                                "name": "n",
                                "kind": 2,
                                "startTimeUnixNano": "1",
                                "endTimeUnixNano": "2",
                                "attributes": [
                                    {"key": "gen_ai.tool.call.id", "value": {"stringValue": "x"}},
                                    {"key": "i", "value": {"intValue": "3"}},
                                    {"key": "a", "value": {"arrayValue": {"values": [{"stringValue": "x"}]}}},
                                ],
                                "status": {"code": 2, "message": "m"},
                            }
                        ],
                    }
                ],
            }
        ]
    },
}
"""By path; all of them want a ``model`` beside."""
RICH_BODIES["/v1/messages/count_tokens"] = {
    name: value for name, value in RICH_BODIES["/v1/messages"].items() if name not in ("max_tokens", "stream")
}
RICH_BODIES["/v1/responses/input_tokens"] = {
    name: value for name, value in RICH_BODIES["/v1/responses"].items() if name != "stream"
}

ADMIN_BODIES: dict[tuple[str, str], Json] = {
    ("put", "/admin/v1/tenants/t1"): {"models": ["m"], "disabled": False},
    ("put", "/admin/v1/tenants/t1/teams/red"): {"models": ["m"], "disabled": False},
    ("post", "/admin/v1/keys"): {
        "id": "k1",
        "tenant": "t1",
        "team": "red",
        "roles": ["user"],
        "models": ["m"],
        "answer_headers": ["run"],
        "repairs": ["sort-tools"],
        "note": "n",
        "expires_at": "90d",
    },
    ("put", "/admin/v1/keys/k1/repairs"): {"repairs": ["sort-tools"]},
    ("post", "/admin/v1/keys/k1/rotate"): {"overlap": "1h"},
    ("put", "/admin/v1/limits"): {
        "level": "key",
        "subject": "k1",
        "kind": "tokens",
        "amount": 1000,
        "period": "minute",
        "on_outage": "deny",
    },
    ("put", "/admin/v1/aliases"): {"level": "team", "subject": "t1/red", "name": "fast", "model": "m"},
}

HOSTILE: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, -(10**19), 1e308, 1e-320, "", "x" * 5000, "\x00", "\u202e", [], {}, [None], [[]],
    {"": None}, {"type": 1}, {"type": []}, {"role": {}}, [{"type": "nope"}], "data:;base64,",
    "data:image/png;base64,%%%", "http://[::1",
]  # fmt: skip
RAW: list[bytes] = [
    b"NaN", b"-Infinity", b"1e400", b"0" * 400, b"1" * 5000, b'"\xff"', b'"\\ud800"', b'{"a":1,"a":2}',
    b"[" * 2000 + b"]" * 2000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"truex", b"'x'", b"\xef\xbb\xbf1",
    b"01", b'"\x01"',
]  # fmt: skip
"""What no JSON writer makes, in the place of a value."""


def places(value: object, at: Place = ()) -> Iterator[Place]:
    """Yield where something stands in a value, at every level."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places(each, (*at, name))


def put(body: Json, at: Place, value: object) -> Any:
    """Return the body with a value in a place."""
    if not at:
        return value
    changed: Any = copy.deepcopy(body)
    holder = changed
    for name in at[:-1]:
        holder = holder[name]
    holder[at[-1]] = value
    return changed
