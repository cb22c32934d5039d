"""Media: named by their content, at their place, and nothing behind the first is claimed."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from engine_adapter.media import NAME_BYTES, has_media, is_medium, media_of, medium_ids, medium_name, with_texts
from engine_adapter.prompt import PromptError
from kvstore.block import routing_hash_array
from tests.samples.chats import TOOLS
from tests.samples.encoders import TOOL_TEMPLATES, encoder_of

PIXELS = bytes(range(256)) * 3


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def data(content: bytes, head: str = "data:image/png;base64") -> str:
    return f"{head},{base64.b64encode(content).decode()}"


def test_what_a_medium_is() -> None:
    assert [is_medium(part) for part in ("x", {"type": "text"}, {"type": "refusal"}, {}, {"type": "file"})] == [
        *(False, False, False, False, True)
    ]
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [image("a"), {"type": "text"}]}]
    assert list(media_of(messages)) == [image("a")]
    assert has_media(messages)
    assert not has_media(messages[:1])
    (_, shown) = with_texts(messages, iter("y"))
    assert shown["content"] == [{"type": "text", "text": "y"}, {"type": "text"}]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (image(data(PIXELS)), image(data(PIXELS, "DATA:image/jpeg;x=1;BASE64")), True),
        (image(data(PIXELS)), image(data(PIXELS + b"1")), False),
        (image(data(PIXELS)), image(data(PIXELS), detail="low"), False),
        (image("https://x/a.png"), image("https://x/a.png"), True),
        (image("https://x/a.png"), image("https://x/b.png"), False),
        (image("data:text/plain,abc"), image("data:text/plain,abd"), False),
        (image("data:,abc"), image("abc"), False),
        (image("data:image/png;base64,!!!"), image("data:image/png;base64,!!?"), False),
        (
            {"type": "input_audio", "input_audio": {"data": base64.b64encode(PIXELS).decode(), "format": "wav"}},
            {"type": "input_audio", "input_audio": {"format": "wav", "data": base64.encodebytes(PIXELS).decode()}},
            True,
        ),
        ({"type": "a", "x": "1"}, {"type": "b", "x": "1"}, False),
        ({**image("a"), "cache_control": {"type": "ephemeral"}}, image("a"), True),
    ],
)
def test_the_same_content_has_the_same_name(one: dict[str, Any], other: dict[str, Any], is_same: bool) -> None:
    assert (medium_name(one) == medium_name(other)) is is_same
    assert len(medium_name(one)) == NAME_BYTES == 4 * len(medium_ids(one))


@pytest.mark.model
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_prompt_is_exact_up_to_its_first_medium(name: str) -> None:
    encoder = encoder_of(name, TOOL_TEMPLATES[name])
    before = [
        {"role": "user", "content": "look at these pictures"},
        {"role": "assistant", "content": "gladly"},
    ]

    def asked(*pixels: str) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": "what is this?"}, *(image(data(p.encode())) for p in pixels)]
        return [*before, {"role": "user", "content": [*parts, {"type": "text", "text": "and that?"}]}]

    def encoded(*pixels: str) -> Any:
        return encoder.encode_with_media(asked(*pixels), TOOLS, seed=5, block_sizes=[4])

    one = encoded("a", "b")
    plain = encoder.encode_chat([*before, {"role": "user", "content": "what is this?"}], TOOLS)
    exact = one.exact_tokens
    assert exact is not None
    assert one.ids.tolist()[:exact] == plain[:exact]
    assert exact > len(encoder.encode_chat(before[:1], TOOLS)) - 8
    assert one.hashes[4].tolist() == routing_hash_array(one.ids.tolist(), 4, 5).tolist()
    assert np.array_equal(encoded("a", "b").ids, one.ids)
    other, swapped = encoded("a", "c"), encoded("b", "a")
    assert other.exact_tokens == swapped.exact_tokens == exact
    assert len(other.ids) == len(swapped.ids) == len(one.ids)
    differing = np.flatnonzero(other.ids != one.ids)
    assert exact < differing[0] <= differing[-1] < differing[0] + 8, "the second medium, and nothing else"
    assert np.flatnonzero(swapped.ids != one.ids)[0] < differing[0]


@pytest.mark.model
def test_a_template_that_shows_no_media_is_not_guessed_at() -> None:
    encoder = encoder_of("smollm2", "chatml-tools")
    hidden = {"role": "user", "content": "x", "name": "n"}
    with pytest.raises(PromptError):
        encoder.encode_with_media([{**hidden, "role": "emperor", "content": [image("a")]}])
