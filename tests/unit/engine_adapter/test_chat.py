"""OpenAI bodies to calls, and what the engine said to answers; no engine runs here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_adapter.embedded.answers import AnswerFold, ChunkWriter, chat_answer, error_body, text_answer
from engine_adapter.embedded.chat import Call, read_chat, read_completion
from engine_adapter.embedded.detokenize import TokenBytes
from engine_adapter.embedded.errors import RequestError
from engine_adapter.embedded.request import FinishReason, Token
from engine_adapter.embedded.service import text_chars
from engine_adapter.embedded.toolcalls import AnswerPart, CallArguments, CallStarted, ContentText

pytestmark = pytest.mark.model
MESSAGES = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SUB = {"type": "function", "function": {"name": "sub"}}


def chat(**members: Any) -> Call:
    return read_chat(json.dumps({"messages": MESSAGES, **members}).encode())


def refusal(**members: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**members)
    return caught.value


@pytest.fixture(scope="module")
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


def test_the_defaults_are_openais() -> None:
    call = chat()
    assert (call.temperature, call.top_p, call.seed, call.max_tokens, call.salt) == (1.0, 1.0, None, None, None)
    assert (call.stream, call.include_usage, call.tool_use, call.grammar) == (False, False, "none", None)
    assert len(call.request_id) == 32
    assert read_completion(b'{"prompt": "x"}').max_tokens == 16


def test_null_is_as_good_as_leaving_a_member_out() -> None:
    """As clients write that print all members of their objects."""
    call = chat(stream=None, stream_options={"include_usage": None}, n=None, tools=None, stop=None)
    assert (call.stream, call.include_usage) == (False, False)
    assert read_completion(b'{"prompt": "x", "stream": null, "echo": null, "suffix": null}').text == "x"


def test_the_newer_name_of_the_limit_wins_and_fields_nobody_knows_are_ignored() -> None:
    call = chat(max_tokens=5, max_completion_tokens=7, user="u", metadata={"a": 1}, store=True)
    assert call.max_tokens == 7


def test_a_header_names_the_request_before_the_body_does() -> None:
    body = json.dumps({"messages": MESSAGES, "rid": "body"}).encode()
    assert read_chat(body).request_id == "body"
    assert read_chat(body, request_id="header").request_id == "header"


@pytest.mark.parametrize(
    ("members", "use", "has_grammar", "has_tools"),
    [
        ({"tools": [ADD]}, "free", False, True),
        ({"tools": [ADD], "tool_choice": "auto"}, "free", False, True),
        ({"tools": [ADD], "tool_choice": "none"}, "none", False, True),
        ({"tools": [ADD], "tool_choice": "required"}, "forced", True, True),
        ({"tools": [ADD, SUB], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "forced", True, True),
        ({"tools": []}, "none", False, False),
        ({"tools": [ADD], "response_format": {"type": "json_object"}}, "none", True, True),
        ({"response_format": {"type": "text"}}, "none", False, False),
    ],
)
def test_the_choice_of_tools(members: dict[str, Any], use: str, has_grammar: bool, has_tools: bool) -> None:
    call = chat(**members)
    assert (call.tool_use, call.grammar is not None, bool(call.tools)) == (use, has_grammar, has_tools)


def test_a_named_tool_alone_is_in_the_grammar_and_parallel_calls_can_be_forbidden() -> None:
    named = chat(tools=[ADD, SUB], tool_choice={"type": "function", "function": {"name": "sub"}}).grammar
    assert named is not None
    assert "sub" in named.lark
    assert '\\"add\\"' not in named.lark
    many = chat(tools=[ADD], tool_choice="required").grammar
    one = chat(tools=[ADD], tool_choice="required", parallel_tool_calls=False).grammar
    assert many is not None
    assert one is not None
    assert "{0,7}" in many.lark
    assert "{0," not in one.lark


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"n": 3}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"top_k": 40}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"function": {"name": "mul"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(members: dict[str, Any], param: str) -> None:
    assert refusal(**members).param == param


@pytest.mark.parametrize(
    "members",
    [{"n": 1}, {"logprobs": False}, {"presence_penalty": 0}, {"top_k": -1}, {"repetition_penalty": 1.0}, {"seed": -5}],
)
def test_asking_for_the_usual_is_no_reason_to_refuse(members: dict[str, Any]) -> None:
    chat(**members)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 1}', b"\xff", b'{"messages": ' + b"[" * 100_000])
def test_a_body_that_is_none_is_the_clients_error(body: bytes) -> None:
    with pytest.raises(RequestError, match="not a request"):
        read_chat(body)


def test_prompts_of_completions() -> None:
    def read(prompt: Any) -> Call:
        return read_completion(json.dumps({"prompt": prompt}).encode())

    assert read("x").text == read(["x"]).text == "x"
    assert read([1, 2]).token_ids == read([[1, 2]]).token_ids == (1, 2)
    assert read([]).token_ids == ()
    for prompt in (["a", "b"], [1, "a"], [1.5], [[1], [2]], [None], [True]):
        with pytest.raises(RequestError):
            read(prompt)


def fold(
    call: Call, ids: Sequence[int], token_bytes: TokenBytes, reason: FinishReason
) -> tuple[AnswerFold, list[AnswerPart]]:
    made = AnswerFold(call, token_bytes, 5, frozenset({2}))
    parts = [part for i in ids for part in made.token(Token(i))]
    return made, parts + made.finish(reason)


def test_an_answer_with_hits_by_tier(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    call = chat(return_cached_tokens_details=True)
    made, parts = fold(call, [*tokenizer.encode("Hello there").ids, 2], token_bytes, "stop")
    made.outcome.hit_tokens = (1, 2, 4, 8)
    answer = chat_answer(call, parts, made.outcome, created_s=1, model="m")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello there"}
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", 2)
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 15}
    }  # fmt: skip
    assert answer["sglext"]["cached_tokens_details"] == {
        "device": 1, "host": 2, "storage": 12, "storage_backend": "keepwarm", "disk": 4, "pool": 8
    }  # fmt: skip
    assert "sglext" not in chat_answer(chat(), parts, made.outcome, created_s=1, model="m")


def test_the_ids_of_the_output_are_told_to_whoever_asks(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    ids = [*tokenizer.encode("Hello there").ids, 2]
    body = json.dumps({"messages": MESSAGES}).encode()
    for call in (chat(return_output_ids_in_sglext=True), read_chat(body, wants_ids=True)):
        made, parts = fold(call, ids, token_bytes, "stop")
        answer = chat_answer(call, parts, made.outcome, created_s=1, model="m")
        assert answer["sglext"] == {"output_ids": [ids]}
        *_, last = ChunkWriter(call, chat=True, created_s=1, model="m").closing(made.outcome)
        assert (last["choices"], last["sglext"]) == ([], {"output_ids": [ids]})


def test_a_stop_string_settles_the_reason_and_an_empty_answer_has_empty_content(
    tokenizer: Tokenizer, token_bytes: TokenBytes
) -> None:
    call = chat(stop=["Hello"])
    made, parts = fold(call, tokenizer.encode("Hello there").ids[:1], token_bytes, "abort")
    assert made.stopped
    assert (made.outcome.finish_reason, made.outcome.matched_stop) == ("stop", "Hello")
    assert chat_answer(call, parts, made.outcome, created_s=1, model="m")["choices"][0]["message"]["content"] == ""


def test_a_call_that_was_cut_short_ends_with_length(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    call = chat(tools=[ADD], tool_choice="required")
    ids = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": ').ids
    made, parts = fold(call, ids, token_bytes, "length")
    message = chat_answer(call, parts, made.outcome, created_s=1, model="m")["choices"][0]["message"]
    assert made.outcome.finish_reason == "length"
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"a":')


def test_chunks_carry_usage_only_when_asked(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    call = chat(stream=True, stream_options={"include_usage": True}, return_cached_tokens_details=True)
    made, parts = fold(call, [*tokenizer.encode("Hi").ids, 2], token_bytes, "stop")
    writer = ChunkWriter(call, chat=True, created_s=1, model="m")
    chunks = [*writer.opening(), *map(writer.part, parts), *writer.closing(made.outcome)]
    assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [
        {"role": "assistant", "content": ""}, {"content": "Hi"}, {}
    ]  # fmt: skip
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert "device" in chunks[-1]["sglext"]["cached_tokens_details"]
    plain = ChunkWriter(chat(stream=True), chat=True, created_s=1, model="m")
    assert len(plain.closing(made.outcome)) == 1
    assert "usage" not in plain.closing(made.outcome)[0]


def test_the_deltas_of_a_call() -> None:
    writer = ChunkWriter(chat(), chat=True, created_s=1, model="m")
    started = writer.part(CallStarted(0, "call_1", "add"))["choices"][0]["delta"]["tool_calls"]
    assert started == [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}]
    grown = writer.part(CallArguments(0, "{}"))["choices"][0]["delta"]["tool_calls"]
    assert grown == [{"index": 0, "function": {"arguments": "{}"}}]


def test_the_shapes_of_completions(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    call = read_completion(b'{"prompt": "x", "stream": true}')
    made, parts = fold(call, tokenizer.encode("Hi").ids, token_bytes, "length")
    answer = text_answer(call, parts, made.outcome, created_s=1, model="m")
    assert (answer["object"], answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (
        "text_completion", "Hi", "length"
    )  # fmt: skip
    writer = ChunkWriter(call, chat=False, created_s=1, model="m")
    assert writer.opening() == []
    assert writer.part(ContentText("Hi"))["choices"][0]["text"] == "Hi"
    assert writer.closing(made.outcome)[0]["choices"][0]["finish_reason"] == "length"


def test_errors_are_sglangs() -> None:
    assert error_body("no", status=400, param="n") == {
        "object": "error", "message": "no", "type": "BadRequestError", "param": "n", "code": 400
    }  # fmt: skip
    assert error_body("no", status=500)["type"] == "InternalServerError"


def test_the_characters_of_a_prompt_are_counted_wherever_they_stand() -> None:
    parts = [{"type": "text", "text": "abc"}, {"n": [1, None, "de"]}]
    assert text_chars("abc") == 3
    assert text_chars([[{"role": "user", "content": parts}], None]) == len("roleusercontenttypetexttextabcnde")
    deep: object = "x"
    for _ in range(10_000):
        deep = [deep]
    assert text_chars(deep) == 1
