"""What is read of requests and of engines' errors."""

from __future__ import annotations

import json

import pytest

from engine_adapter.base import Merge
from engine_adapter.sglang import Sglang
from gateway.errors import BadRequest, NoInstance
from gateway.protocols.base import Answering
from gateway.protocols.openai import COMPLETIONS, AnswerReader, read_ask
from gateway.protocols.openai_errors import engine_error_body, error_body
from gateway.protocols.sse import data_of
from tests.scripted_engine import answer


def test_a_chat_is_read() -> None:
    body = (
        b'{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user"}],"tools":[{}]}'
    )
    ask = read_ask(body, "chat")
    assert (ask.model, ask.stream, ask.shows_usage, ask.shows_detail) == ("m", True, True, False)
    assert (ask.messages, ask.tools, ask.prompt) == ([{"role": "user"}], [{}], None)


@pytest.mark.parametrize(
    ("prompt", "read"), [("hi", "hi"), ([1, 2], [1, 2]), (["a"], None), ([], None), ([True], None), (3, None)]
)
def test_prompts_that_can_be_hashed(prompt: object, read: object) -> None:
    assert read_ask(json.dumps({"model": "m", "prompt": prompt}).encode(), "completions").prompt == read


@pytest.mark.parametrize("messages", [None, "x", [1], {}])
def test_odd_messages_are_left_to_the_engine(messages: object) -> None:
    assert read_ask(json.dumps({"model": "m", "messages": messages}).encode(), "chat").messages is None


@pytest.mark.parametrize(
    "body", [b'{"model":1}', b'{"model":""}', b'{"model":"m","stream":1}', b'{"model":"m","stream_options":[]}']
)
def test_what_the_gateway_cannot_work_with_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_ask(body, "chat")


def test_the_upstream_body_is_the_original_where_nothing_changes() -> None:
    body = b' {"model" : "m"}\n'
    ask = read_ask(body, "chat")
    assert ask.translated.edited({}) is body
    merged = ask.translated.edited({"stream_options": Merge({"include_usage": True})})
    assert merged == b'{"model" : "m","stream_options":{"include_usage":true}}'
    null = read_ask(b'{"model":"m","stream_options":null}', "chat").translated
    assert null.edited({"stream_options": Merge({"include_usage": True})}) == (
        b'{"model":"m","stream_options":{"include_usage":true}}'
    )


@pytest.mark.parametrize(
    ("status", "body", "message", "kind"),
    [
        (
            400,
            {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400},
            "too long",
            "BadRequestError",
        ),
        (422, {"detail": "no"}, "no", "invalid_request_error"),
        (429, {"error": "slow"}, "slow", "rate_limit_error"),
        (500, {"message": "oops"}, "oops", "upstream_error"),
    ],
)
def test_engine_errors_get_openais_shape(status: int, body: dict[str, object], message: str, kind: str) -> None:
    error = json.loads(engine_error_body(status, json.dumps(body).encode()))["error"]
    assert (error["message"], error["type"]) == (message, kind)
    assert set(error) == {"message", "type", "param", "code"}


def test_errors_that_have_the_shape_go_through_and_noise_does_not() -> None:
    right = b'{"error" : {"message": "x"}, "more": 1}'
    assert engine_error_body(400, right) is right
    assert b"<html>" not in engine_error_body(502, b"<html>stack trace</html>")
    assert json.loads(error_body(NoInstance("none")))["error"]["code"] == "no_instance"


def test_an_answer_loses_only_what_nobody_asked_for() -> None:
    body = json.dumps(answer("x", sglext={"a": 1})).encode()
    reader = AnswerReader(Sglang(), shows_usage=False, shows_detail=False)
    assert json.loads(reader.answer(body)) == answer("x")
    assert reader.seen.extension == {"a": 1}
    assert AnswerReader(Sglang(), shows_usage=False, shows_detail=True).answer(body) is body
    odd = b'{"choices":[{"logprobs":[-Infinity]}],"x":"\\ud800"}'  # which less strict parsers take
    assert reader.answer(odd) is odd


def test_what_does_not_validate_is_told_with_its_places() -> None:
    detail = [{"loc": ["body", "messages"], "msg": "Field required"}, {"loc": ["body", "n", 0], "msg": "too many"}]
    error = json.loads(engine_error_body(422, json.dumps({"detail": detail}).encode()))["error"]
    assert error["message"] == "body.messages: Field required; body.n.0: too many"


@pytest.mark.parametrize(
    "sent",
    [
        b'data: {"model":"own",\ndata: "choices":[]}\n\n',
        b'\xef\xbb\xbfdata: {"model":"own","choices":[]}\n\n',
        b'id: 1\r\ndata: {\r\ndata: "model": "own",\r\ndata: "choices": []\r\ndata: }\r\n\r\n',
    ],
)
def test_an_event_is_edited_wherever_its_lines_end(sent: bytes) -> None:
    shown, _ = AnswerReader(Sglang(), shows_usage=True, shows_detail=False, model="shown").event(sent)
    told = data_of(shown)
    assert told is not None
    assert json.loads(told) == {"model": "shown", "choices": []}
    strict = [line for line in shown.removeprefix(b"\xef\xbb\xbf").splitlines() if line]
    assert all(line.partition(b":")[0] in (b"data", b"id") for line in strict)
    assert shown.startswith(sent[:3])


@pytest.mark.parametrize(
    ("asked", "choices"),
    [({}, 1), ({"n": 2}, 2), ({"n": None}, 1), ({"n": "x"}, 1), ({"n": 2, "prompt": ["a", "b", "c"]}, 6),
     ({"prompt": [1, 2]}, 1), ({"prompt": [[1], [2]]}, 2), ({"prompt": []}, 1)],
)  # fmt: skip
def test_how_many_choices_are_asked_for(asked: dict[str, object], choices: int) -> None:
    ask = read_ask(json.dumps({"model": "m", **asked}).encode(), "completions")
    answering = Answering("r", model="m", served_model="m")
    assert COMPLETIONS.reader(ask, Sglang(), answering, is_native=True).seen.choices == choices
