"""Tool calls in text: however the text is cut, the same calls come out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.embedded.toolcalls import (
    AnswerParser,
    CallArguments,
    CallStarted,
    ContentText,
    ForcedCalls,
    FreeCalls,
    call_closing,
    call_opening,
    new_call_id,
)


def ids() -> Iterator[str]:
    number = 0
    while True:
        yield f"call_{number}"
        number += 1


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(borders)]


def fold(parser: AnswerParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", []
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.finish():
        if isinstance(part, ContentText):
            content += part.text
        elif isinstance(part, CallStarted):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        else:
            assert part.index == len(calls) - 1
            calls[-1][1] += part.text
    return content, [(name, arguments) for name, arguments in calls]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(calls=st.lists(st.tuples(st.sampled_from(["add", "read_file"]), ARGUMENTS), min_size=1, max_size=3), places=CUTS)
def test_both_parsers_read_what_the_template_writes(
    calls: list[tuple[str, dict[str, object]]], places: list[int]
) -> None:
    wanted = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    text = "\n".join(call_opening(name) + arguments + call_closing() for name, arguments in wanted)
    for parser in (ForcedCalls(), FreeCalls(frozenset({"add", "read_file"}))):
        assert fold(parser, cut(text, places)) == ("", wanted)


@given(arguments=ARGUMENTS, length=st.integers(0, 300), places=CUTS)
def test_a_forced_call_cut_short_tells_what_there_is(
    arguments: dict[str, object], length: int, places: list[int]
) -> None:
    written = json.dumps(arguments)
    text = (call_opening("add") + written + call_closing())[:length]
    content, calls = fold(ForcedCalls(), cut(text, places))
    assert content == ""
    if length >= len(call_opening("add")):
        assert calls[0][0] == "add"
        told = calls[0][1]
        assert told.startswith(written) or written.startswith(told)
    else:
        assert calls == []


def test_a_forced_name_comes_before_its_arguments_and_these_as_they_grow() -> None:
    parser = ForcedCalls(ids().__next__)
    assert parser.feed('<tool_call>\n{"name": "add", "argum') == []
    assert parser.feed('ents": {"a"') == [CallStarted(0, "call_0", "add"), CallArguments(0, '{"a"')]
    assert parser.feed(": 1}") == [CallArguments(0, ": 1")]
    assert parser.feed("}\n</tool_call>") == [CallArguments(0, "}")]
    assert parser.finish() == []


@given(text=st.text(alphabet='<tool_cal>/{}"\n ax', max_size=40), places=CUTS)
def test_free_text_without_a_call_comes_back_whole(text: str, places: list[int]) -> None:
    content, calls = fold(FreeCalls(frozenset({"add"})), cut(text, places))
    assert (content, calls) == (text, [])


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "unknown", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '["add"]',
        '{"name": "add", "arguments": {}',
        "",
        "[" * 5000,
    ],
)
def test_a_malformed_free_call_stays_content(body: str) -> None:
    text = f"Let me see.\n<tool_call>\n{body}\n</tool_call> done"
    assert fold(FreeCalls(frozenset({"add"})), [text]) == (text, [])


def test_free_text_before_a_call_is_content_and_streams_at_once() -> None:
    parser = FreeCalls(frozenset({"add"}), ids().__next__)
    assert parser.feed("I add.\n<to") == [ContentText("I add.\n")]
    assert parser.feed("ol_call>") == []
    parts = parser.feed('\n{"name": "add", "arguments": {"a":1}}\n</tool_call>\n')
    assert parts == [CallStarted(0, "call_0", "add"), CallArguments(0, '{"a":1}')]
    assert parser.finish() == []


def test_free_arguments_in_another_layout_are_written_as_json() -> None:
    text = '<tool_call>{"arguments": {"a": 1, "ü": "x"},\n "name": "add"}</tool_call>'
    assert fold(FreeCalls(frozenset({"add"})), [text]) == ("", [("add", '{"a": 1, "ü": "x"}')])


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert fold(FreeCalls(frozenset({"add"})), ['<tool_call>\n{"name": "add"}\n</tool_call>']) == ("", [("add", "{}")])


def test_ids_are_unique() -> None:
    assert len({new_call_id() for _ in range(1000)}) == 1000
