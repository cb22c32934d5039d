"""What an engine says of a chat completion, as clients of other protocols are told it."""

from __future__ import annotations

import json

import pytest

from gateway.errors import BadRequest
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.own_names import engine_error, named_by, own_member, own_words
from gateway.protocols.responses.protocol import Responses

INPUT = Responses.chat_names


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("messages", "input"),
        ("messages[3].content[0].image_url", "input"),
        ("body.messages.0", "input"),
        ("max_tokens", "max_output_tokens"),
        ("response_format.json_schema.schema", "text.format"),
        ("tools[0].function.parameters", "tools"),
        ("temperature", "temperature"),
    ],
)
def test_members_are_the_clients(param: str, own: str) -> None:
    assert own_member(param, INPUT) == own


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("messages[1].content[0]: a part of type 'x'", "input: a part of type 'x'"),
        ("body.messages.0.content: Field required", "input: Field required"),
        ("'max_tokens' is too large", "'max_output_tokens' is too large"),
        ("max_tokens=9 leaves no room for the messages", "max_output_tokens=9 leaves no room for the messages"),
        ("tools.0.function.name: too long", "tools: too long"),
        ("the user sent too many messages. Stop.", "the user sent too many messages. Stop."),
        ("there are too many messages: 9", "there are too many messages: 9"),
        ("my_messages.x, max_tokens_total", "my_messages.x, max_tokens_total"),
    ],
)
def test_sentences_name_the_clients_members_and_keep_their_other_words(said: str, told: str) -> None:
    assert own_words(said, INPUT) == told


def test_places_within_translated_messages_are_not_the_clients() -> None:
    """A system prompt of its own is the first message of the chat."""
    assert own_words("messages[1].content must be text", MESSAGES.chat_names) == "messages must be text"
    assert own_words("stop: at most 4", MESSAGES.chat_names) == "stop_sequences: at most 4"


def test_an_engines_shape_does_not_matter() -> None:
    for body in ({"error": {"message": "'messages'", "param": "messages", "code": 7}},
                 {"object": "error", "message": "'messages'", "param": "messages", "code": 7}):  # fmt: skip
        told = json.loads(engine_error(400, json.dumps(body).encode(), INPUT))["error"]
        assert told == {"message": "'input'", "type": "invalid_request_error", "param": "input", "code": 7}


def test_errors_of_our_own_are_named_too() -> None:
    assert named_by(BadRequest("no", param="messages"), INPUT).param == "input"
    assert named_by(BadRequest("no", param="input[2].content"), INPUT).param == "input[2].content"
    assert named_by(BadRequest("no"), INPUT).param is None
