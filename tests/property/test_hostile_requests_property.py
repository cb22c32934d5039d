"""Whatever JSON a client sends, reading it ends in a request or in a refusal, never in a fault of the gateway's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.messages import check_messages, check_tools
from engine_adapter.prompt_errors import PromptError
from gateway.diagnosis.compare import compare
from gateway.diagnosis.digests import system_digest
from gateway.diagnosis.sections import keep
from gateway.errors import BadRequest
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.base import Ask, EndpointProtocol, scan_body
from gateway.protocols.embeddings import EMBEDDINGS
from gateway.protocols.form import scan_text
from gateway.protocols.openai import CHAT, COMPLETIONS
from gateway.protocols.responses.protocol import Responses
from gateway.repair.apply import repair
from gateway.repair.policies import POLICIES
from tracing.detail import Comparison
from tracing.messages import message_chain, new_tool_result_ids, tool_result_ids

RESPONSES = Responses(None)  # type: ignore[arg-type]  # what nothing refers to needs no store
PROTOCOLS: list[EndpointProtocol] = [CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS]

_WORDS = [
    "role", "content", "type", "text", "user", "assistant", "tool", "system", "input_text", "output_text", "tool_use",
    "tool_result", "tool_use_id", "tool_calls", "function", "name", "arguments", "input", "source", "base64", "image",
    "thinking", "function_call", "function_call_output", "call_id", "output", "reasoning", "summary", "id", "message",
]  # fmt: skip
_MEMBERS = [
    "messages", "system", "tools", "tool_choice", "input", "instructions", "text", "reasoning", "include", "metadata",
    "stop_sequences", "output_config", "thinking", "stream_options", "prompt", "max_tokens", "top_k", "temperature",
    "parallel_tool_calls", "max_output_tokens", "top_logprobs", "cache_salt", "stream", "truncation", "user",
]  # fmt: skip
_numbers = st.integers(-1, 9) | st.floats(allow_nan=False, allow_infinity=False)
_leaf = st.none() | st.booleans() | _numbers | st.sampled_from(_WORDS)
_json = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=5),
    max_leaves=12,
)
_part = st.dictionaries(st.sampled_from(_WORDS), _json, max_size=4)
_message = st.fixed_dictionaries({"content": st.lists(_part, min_size=1, max_size=3)}, optional={"role": _json})
_body = st.dictionaries(st.sampled_from(_MEMBERS), _json, max_size=4) | st.fixed_dictionaries(
    {"messages": st.lists(_message, max_size=3), "max_tokens": st.just(1)}, optional={"input": st.lists(_message)}
)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.endpoint)
@settings(max_examples=40)
@given(body=_body)
def test_any_json_is_read_or_refused(protocol: EndpointProtocol, body: dict[str, Any]) -> None:
    try:
        ask: Ask = protocol.read(scan_body(json.dumps({"model": "m", **body}).encode()), None)
    except BadRequest:
        return
    messages = (ask.messages if ask.linked is None else ask.linked) or ()
    message_chain(messages)
    tool_result_ids(messages)
    new_tool_result_ids(messages)
    try:
        check_messages(ask.messages or ())
        check_tools(ask.tools)
    except PromptError:
        pass
    assert json.loads(ask.body)["model"] == "m"


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.endpoint)
@settings(max_examples=40)
@given(former=_body, latter=_body, answer=_message)
def test_any_two_requests_can_be_held_against_each_other(
    protocol: EndpointProtocol, former: dict[str, Any], latter: dict[str, Any], answer: dict[str, Any]
) -> None:
    kept = []
    for body in (former, {**latter, "messages": [*_listed(former), answer, *_listed(latter)]}):
        try:
            ask = protocol.read(scan_body(json.dumps({"model": "m", **body}).encode()), None)
        except BadRequest:
            return
        kept.append(keep("r", ask, answer))
    comparison, change = compare(kept[0], kept[1], shows_words=True)
    assert (change is None) == (comparison is not Comparison.CHANGED)
    system_digest(kept[1], {**latter})
    for held in kept:
        repair(scan_text(held.text), tuple(POLICIES))


def _listed(body: dict[str, Any]) -> list[Any]:
    messages = body.get("messages")
    return messages if isinstance(messages, list) else []
