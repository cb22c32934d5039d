"""Characters that an engine cut in two, joined again over a stream's chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.openai_compatible import OpenAICompatible
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.base import Answering, scan_body
from gateway.protocols.decode import json_object, whole_pairs
from gateway.protocols.half_pairs import PairJoiner
from gateway.protocols.openai import CHAT
from gateway.protocols.sse import data_of
from tests.scripted_engine import DONE, chunk

Json = dict[str, Any]
HIGH, LOW, GRIN = "\ud83d", "\ude00", "😀"


def sent(told: Json) -> bytes:
    """Return the event as an engine sends it whose strings are UTF-16."""
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def units(text: str) -> list[str]:
    """Return a text's UTF-16 units."""
    data = text.encode("utf-16-le")
    return [data[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(data), 2)]


def deltas(events: list[bytes]) -> list[Json]:
    """Return the deltas that come out, each event by itself."""
    joiner = PairJoiner()
    out = [made for event in events for made in joiner.join([event])]
    chunks = [json.loads(data) for made in out if (data := data_of(made)) not in (None, b"[DONE]")]
    return [choice.get("delta", choice) for made in chunks for choice in made["choices"]]


def said(found: list[Json], name: str = "content") -> str:
    return "".join(delta.get(name) or "" for delta in found)


@given(text=st.text(alphabet="aé中😀🏔\u200d", max_size=12), cuts=st.sets(st.integers(0, 24)))
def test_however_a_text_is_cut_it_is_the_text(text: str, cuts: set[int]) -> None:
    pieces, last = list[str](), 0
    for cut in sorted({*cuts, len(units(text))}):
        pieces.append("".join(units(text)[last:cut]))
        last = cut
    events = [*(sent(chunk({"content": piece})) for piece in pieces), sent(chunk({}, finish="stop")), DONE]
    assert said(deltas(events)) == text
    ask = MESSAGES.read(scan_body(b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}]}'))
    reader = MESSAGES.reader(ask, OpenAICompatible(), Answering("r"), is_native=False)
    shown = b"".join(reader.event(event)[0] for event in PairJoiner().join(events)).decode()
    told = [json.loads(line[6:]) for line in shown.splitlines() if line.startswith("data: ")]
    assert "".join(each["delta"]["text"] for each in told if each["type"] == "content_block_delta") == text
    assert reader.seen.text == text


@pytest.mark.parametrize(
    ("pieces", "text"),
    [([HIGH], "\ufffd"), ([LOW], "\ufffd"), ([HIGH, HIGH, LOW], f"\ufffd{GRIN}"), ([HIGH, "x"], "\ufffdx"),
     ([f"a{HIGH}", f"{LOW}b"], f"a{GRIN}b"), ([f"{LOW}{HIGH}", LOW], f"\ufffd{GRIN}")],
)  # fmt: skip
def test_a_half_that_stays_alone_is_shown_as_one(pieces: list[str], text: str) -> None:
    events = [*(sent(chunk({"content": piece})) for piece in pieces), sent(chunk({}, finish="stop"))]
    assert said(deltas(events)) == text
    ends = [*events[:-2], sent(chunk({"content": pieces[-1]}, finish="stop"))]
    assert said(deltas(ends)) == text


def test_each_text_and_each_call_waits_for_its_own_half() -> None:
    def call(index: int, arguments: str) -> bytes:
        return sent(chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}))

    events = [sent(chunk({"reasoning_content": HIGH})), sent(chunk({"content": "x"})), call(0, f'"{HIGH}'),
              call(1, '"y"'), call(0, f'{LOW}"'), sent(chunk({}, finish="tool_calls"))]  # fmt: skip
    found = deltas(events)
    assert [said(found, name) for name in ("reasoning_content", "content")] == ["\ufffd", "x"]
    pieces = [piece for delta in found for piece in delta.get("tool_calls", ())]
    first = "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == 0)
    assert first == f'"{GRIN}"'
    names = [name for delta in found for name in delta if delta[name] not in ("", [])]
    assert names.index("reasoning_content") < names.index("content")  # told before what came behind it


def test_choices_and_completions_are_kept_apart() -> None:
    def piece(index: int, text: str, finish: str | None = None) -> bytes:
        return sent({"id": "c", "choices": [{"index": index, "text": text, "finish_reason": finish}]})

    found = deltas([piece(0, HIGH), piece(1, HIGH), piece(0, LOW), piece(1, "", "stop"), piece(0, "", "stop")])
    assert ["".join(c["text"] for c in found if c["index"] == n) for n in (0, 1)] == [GRIN, "\ufffd"]


def test_what_has_no_halves_goes_through_as_it_came() -> None:
    events = [b": ids 7\n" + sent(chunk({"content": GRIN})), sent({"error": {"message": "\\ud83d"}}), b": x\n\n", DONE]
    assert PairJoiner().join(events) == events
    assert PairJoiner().join(events[3:]) == events[3:]
    held = PairJoiner()
    held.join([sent(chunk({"content": HIGH}))])
    kept = b'data: {"choices": [], "usage":null}\n\n'
    assert held.join([kept]) == [kept]


def test_whole_answers_and_other_json_are_mended_too() -> None:
    body = json.dumps({"choices": [{"index": 0, "message": {"content": f"a{HIGH}"}, "finish_reason": "stop"}]}).encode()
    reader = CHAT.reader(CHAT.read(scan_body(b'{"model":"n","messages":[]}')), OpenAICompatible(),
                         Answering("r", model="n", served_model="m"), is_native=True)  # fmt: skip
    assert json.loads(reader.answer(whole_pairs(body)))["choices"][0]["message"]["content"] == "a\ufffd"
    assert reader.seen.text == "a\ufffd"
    assert json_object(json.dumps({HIGH: [LOW, f"{HIGH}{LOW}"]}).encode()) == {"\ufffd": ["\ufffd", GRIN]}
    for whole in (b'{"a": "\\\\ud83d"}', '{"a": "😀"}'.encode(), b'{"a": "\\ud83d', b"NaN \\ud83d"):
        assert whole_pairs(whole) == whole
