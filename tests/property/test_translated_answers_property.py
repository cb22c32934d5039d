"""Translated streams: whatever an engine streams, and however it is cut, clients get the same answer as unstreamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.sglang import Sglang
from gateway.protocols.answer import AnswerBlocks, Block, Closed, Grew, Kind, Opened
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.base import Answering, AnswerReader, scan_body
from gateway.protocols.responses.answer import Echo
from gateway.protocols.responses.stream import ResponseWriter
from gateway.protocols.sse import EventCutter
from gateway.protocols.translated import TranslatedReader
from tests.samples.answers import THOUGHT_AND_TWO_CALLS, call_piece, streamed
from tests.scripted_engine import Json, chunk
from tests.scripted_engine import event as sse

_NAMES = ["choices", "delta", "tool_calls", "function", "usage", "index", "finish_reason", "error", "content"]
ANSWERING = Answering("req-1", model="m", served_model="m", created_s=1)


def _reader(protocol: str) -> AnswerReader:
    if protocol == "messages":
        ask = MESSAGES.read(scan_body(b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]}'))
        return MESSAGES.reader(ask, Sglang(), ANSWERING, is_native=False)
    return TranslatedReader(Sglang(), ResponseWriter(Echo(ANSWERING, {}, ()), lambda response: None))


@st.composite
def _deltas(draw: st.DrawFn) -> list[Json]:
    """Draw texts, thoughts and calls, the pieces of each call in order and those of different calls mixed at will."""
    texts = st.text('ab é🌍\n"\\', min_size=1, max_size=4)
    pending: list[list[Json]] = []
    for index in range(draw(st.integers(0, 3))):
        whole = json.dumps(draw(st.dictionaries(texts, texts, max_size=2)), ensure_ascii=False)
        cut = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
        pieces = [whole[a:b] for a, b in zip([0, *cut], [*cut, len(whole)], strict=True)]
        pending.append([call_piece(index, id=f"c{index}", name="f"), *(call_piece(index, arguments=p) for p in pieces)])
    deltas: list[Json] = draw(
        st.lists(st.builds(lambda n, t: {n: t}, st.sampled_from(["content", "reasoning_content"]), texts), max_size=5)
    )
    started = 0
    while any(pending):
        choices = [n for n, pieces in enumerate(pending) if pieces and n <= started]
        chosen = draw(st.sampled_from(choices))
        started = max(started, chosen + 1)
        deltas.append(pending[chosen].pop(0))
    return deltas


def _expected(deltas: Sequence[Json]) -> tuple[str, str, dict[int, str]]:
    calls: dict[int, str] = {}
    for delta in deltas:
        for piece in delta.get("tool_calls", ()):
            calls[piece["index"]] = calls.get(piece["index"], "") + piece["function"]["arguments"]
    words = ["".join(d.get(name, "") for d in deltas) for name in ("content", "reasoning_content")]
    return words[0], words[1], calls


@given(_deltas())
def test_blocks_open_one_at_a_time_and_lose_nothing(deltas: list[Json]) -> None:
    fold = AnswerBlocks()
    events = [event for delta in deltas for event in fold.take(delta)] + fold.finish()
    open_block: Block | None = None
    grown: dict[int, str] = {}
    for event in events:
        if isinstance(event, Opened):
            assert open_block is None
            open_block = event.block
        else:
            assert event.block is open_block
            if isinstance(event, Grew):
                grown[id(event.block)] = grown.get(id(event.block), "") + event.text
            elif isinstance(event, Closed):
                open_block = None
    assert open_block is None
    assert all(grown.get(id(block), "") == block.text for block in fold.blocks)
    text, thought, calls = _expected(deltas)
    assert "".join(b.text for b in fold.blocks if b.kind is Kind.TEXT) == text
    assert "".join(b.text for b in fold.blocks if b.kind is Kind.REASONING) == thought
    assert {b.call_id: b.text for b in fold.blocks if b.kind is Kind.CALL} == {f"c{n}": t for n, t in calls.items()}


@pytest.mark.parametrize("is_numbered", [True, False])
def test_calls_that_all_come_at_one_index_are_told_apart(is_numbered: bool) -> None:
    pieces = [
        call_piece(0, id="a", name="look", arguments='{"x":1}'),
        call_piece(0, id="b", name="find"),
        call_piece(0, id="", arguments="{}"),
        call_piece(0, id="c", name="look", arguments='{"x":2}'),
    ]
    if not is_numbered:
        for piece in pieces:
            del piece["tool_calls"][0]["index"]
    fold, reader = AnswerBlocks(), _reader("messages")
    for piece in pieces:
        fold.take(piece)
        reader.seen.take(0, piece)
    fold.finish()
    assert [(b.call_id, b.name, b.text) for b in fold.blocks] == [
        ("a", "look", '{"x":1}'), ("b", "find", "{}"), ("c", "look", '{"x":2}')
    ]  # fmt: skip
    assert [(call.id, call.name) for call in reader.seen.tool_calls] == [("a", "look"), ("b", "find"), ("c", "look")]


def test_a_call_whose_pieces_each_have_an_id_of_their_own_is_one() -> None:
    pieces = [
        call_piece(0, id="a", name="look"),
        call_piece(0, id="x", arguments="{"),
        call_piece(0, id="y", arguments="}"),
    ]
    fold, reader = AnswerBlocks(), _reader("messages")
    for piece in pieces:
        fold.take(piece)
        reader.seen.take(0, piece)
    fold.finish()
    assert [(b.call_id, b.text) for b in fold.blocks] == [("a", "{}")]
    assert len(reader.seen.tool_calls) == 1


@pytest.mark.parametrize("protocol", ["messages", "responses"])
def test_other_choices_are_not_mixed_into_the_only_one(protocol: str) -> None:
    other = chunk({"content": "OTHER"}, finish="stop")
    other["choices"][0]["index"] = 1
    alone = [*streamed([{"content": "x"}])]
    shown, reader = _relayed(protocol, [alone[0], sse(other), *alone[1:]])
    assert shown == _relayed(protocol, alone)[0]
    assert reader.has_ended()


@pytest.mark.parametrize("protocol", ["messages", "responses"])
@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_r01_any_cut_gives_the_same_bytes_and_the_same_counts(protocol: str, cuts: list[int]) -> None:
    data = b"".join(streamed(THOUGHT_AND_TWO_CALLS, "tool_calls", prompt=20, cached=16))
    whole, reader = _relayed(protocol, [data])
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    cut, cut_reader = _relayed(protocol, [data[a:b] for a, b in pairwise(places)])
    assert cut == whole
    assert cut_reader.usage() == reader.usage()
    assert cut_reader.has_ended()
    assert "\ufffd" not in whole.decode()


def _relayed(protocol: str, reads: Sequence[bytes]) -> tuple[bytes, AnswerReader]:
    reader, cutter = _reader(protocol), EventCutter(1 << 20)
    return b"".join(reader.event(event)[0] for read in reads for event in cutter.feed(read)), reader


@pytest.mark.parametrize("protocol", ["messages", "responses"])
@settings(max_examples=60)
@given(
    noise=st.lists(
        st.one_of(
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=3),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(
                            [
                                "choices",
                                "delta",
                                "tool_calls",
                                "function",
                                "usage",
                                "index",
                                "finish_reason",
                                "error",
                                "content",
                            ]
                        ),
                        inner,
                        max_size=3,
                    )
                ),
                max_leaves=12,
            ).map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n"),
            st.binary(max_size=20).map(lambda data: b"data: " + data.replace(b"\n", b"") + b"\n\n"),
        ),
        max_size=4,
    )
)
def test_no_chunk_of_an_engine_breaks_a_reader(protocol: str, noise: list[bytes]) -> None:
    reader = _reader(protocol)
    for event in [*noise, *streamed([{"content": "x"}])]:
        if reader.has_ended() or reader.seen.error_body is not None:
            break
        reader.event(event)
    assert reader.has_ended() or reader.seen.error_body is not None
