"""When an answer is whole, and what is counted of it, whatever shape its engine gives its ends and its counts."""

from __future__ import annotations

import json

import pytest

from engine_adapter.openai_compatible import OpenAICompatible
from gateway.errors import UpstreamUnusable
from gateway.protocols.anthropic.native import NativeMessageReader
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.base import Answering, EndpointProtocol, scan_body
from gateway.protocols.base import AnswerReader as Reader
from gateway.protocols.embeddings import EmbeddingsReader
from gateway.protocols.openai import CHAT, AnswerReader
from gateway.protocols.responses.native import NativeResponseReader
from gateway.protocols.sse import event_of, is_whole_event
from tests.scripted_engine import Json, answer, chunk, event, usage, usage_chunk


def _reader(*, asks: bool = True) -> AnswerReader:
    return AnswerReader(OpenAICompatible(), shows_usage=asks, shows_detail=False)


def _choice(index: int, finish: str | None = None) -> bytes:
    return event({"id": "c", "choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": finish}]})


def test_an_event_that_is_cut_behind_any_of_its_braces_is_not_whole() -> None:
    whole = event(chunk({"content": "}"}, usage=usage(1, 1))).rstrip(b"\n")
    cuts = [at for at in range(1, len(whole)) if whole[at - 1 : at] == b"}"]
    assert len(cuts) > 3
    assert [is_whole_event(whole[:at]) for at in cuts] == [False] * len(cuts)
    assert is_whole_event(whole)


@pytest.mark.parametrize("last", [0, 1])
def test_an_answer_of_several_choices_is_whole_when_all_of_them_are(last: int) -> None:
    reader = _reader()
    for index in (0, 1):
        reader.event(_choice(index))
    reader.event(_choice(1 - last, "stop"))
    assert not reader.seen.is_answered
    reader.event(_choice(last, "length"))
    assert reader.seen.is_answered


def test_an_empty_finish_reason_finishes_nothing() -> None:
    reader = _reader()
    reader.event(event(chunk({"content": "x"}, finish="")))
    assert reader.seen.finish_reason is None
    assert not reader.seen.is_answered


@pytest.mark.parametrize("finish", ["", {}, ["abort"]])
def test_an_odd_finish_reason_finishes_no_translated_answer(finish: object) -> None:
    ask = MESSAGES.read(
        scan_body(b'{"model":"m","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"x"}]}')
    )
    reader = MESSAGES.reader(ask, OpenAICompatible(), Answering("r"), is_native=False)
    reader.event(event(chunk({"content": "x"}, finish=finish)))  # type: ignore[arg-type]
    assert not reader.seen.is_answered
    assert reader.seen.error is None


@pytest.mark.parametrize("given", [{"x": 1}, '{"x": 1}'])
def test_arguments_are_remembered_as_text_also_where_an_engine_writes_the_object(given: object) -> None:
    reader = _reader()
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    reader.event(event(chunk({"tool_calls": [call]}, finish="tool_calls")))
    message = reader.seen.message()
    assert message is not None
    assert message["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]


def test_an_empty_stop_reason_of_a_message_is_none() -> None:
    reader = NativeMessageReader()
    reader.event(event_of(b'{"type":"message_delta","delta":{"stop_reason":""}}'))
    assert reader.seen.finish_reason is None


def test_what_comes_behind_a_choices_end_does_not_undo_it() -> None:
    reader = _reader()
    reader.event(event(chunk({"content": "x"}, finish="stop")))
    reader.event(event({**chunk({}), "usage": usage(7, 1)}))
    assert reader.seen.is_answered


@pytest.mark.parametrize("choices", [{}, {"choices": None}])
def test_a_chunk_of_usage_has_choices_for_who_asked_for_it(choices: Json) -> None:
    bare = {"id": "c", "usage": usage(7, 3), **choices}
    shown, _ = _reader().event(event(bare))
    assert json.loads(shown[6:]) == {"id": "c", "usage": usage(7, 3), "choices": []}
    reader = _reader(asks=False)
    assert b"usage" not in reader.event(event(bare))[0]
    assert reader.seen.usage == usage(7, 3)
    given = event(usage_chunk(7, 3))
    assert _reader().event(given)[0] is given


def test_counts_that_a_later_delta_leaves_out_are_what_they_were() -> None:
    reader = NativeMessageReader()
    told: list[Json] = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 0, "output_tokens": 1}}},
        {"type": "message_delta", "delta": {}, "usage": {"input_tokens": 10, "cache_read_input_tokens": 90,
                                                         "output_tokens": 2}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
        {"type": "message_delta", "delta": {}, "usage": {"cache_read_input_tokens": None}},
        {"type": "message_delta", "delta": {}},
    ]  # fmt: skip
    for each in told:
        reader.event(event_of(json.dumps(each).encode()))
    reading = reader.usage()
    assert reading is not None
    assert (reading.usage.fresh_tokens, reading.usage.hit_tokens, reading.usage.output_tokens) == (10, 90, 7)


@pytest.mark.parametrize(
    "reader",
    [_reader(), NativeMessageReader(), NativeResponseReader(lambda response: None), EmbeddingsReader()],
    ids=["chat", "messages", "responses", "embeddings"],
)
def test_half_a_body_is_no_answer(reader: Reader) -> None:
    whole = json.dumps(answer("x")).encode()
    for half in (whole[:-1], whole[: len(whole) // 2], b"", b"<html>"):
        with pytest.raises(UpstreamUnusable, match="no JSON"):
            reader.answer(half)
    assert reader.answer(whole) is whole


def test_a_stream_may_begin_with_a_byte_order_mark() -> None:
    reader = _reader()
    first = b"\xef\xbb\xbf" + event({**chunk({"content": "x"}, finish="stop"), "usage": usage(7, 1)})
    assert reader.event(first) == (first, True)
    assert reader.seen.usage == usage(7, 1)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("given", [{}, {"tools": []}, {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}])
def test_whether_calls_may_come_is_known_of_every_answer(given: Json, is_native: bool) -> None:
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], **given}
    protocols: tuple[EndpointProtocol, ...] = (CHAT, MESSAGES)
    for protocol in protocols:
        ask = protocol.read(scan_body(json.dumps(asked).encode()), None)
        reader: Reader = protocol.reader(ask, OpenAICompatible(), Answering("r"), is_native=is_native)
        assert reader.seen.may_call == bool(given.get("tools"))
