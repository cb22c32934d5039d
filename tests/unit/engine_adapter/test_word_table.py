"""Tables of words: the compiled loop over an automaton's tables against Python's own expressions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.automaton import UnsupportedExpression, automaton
from engine_adapter.word_table import CompiledTable, PatternTable, WordTable, word_table

_words = pytest.importorskip("engine_adapter._words", reason="there was no C compiler at installation")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CAMEL = r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*|[0-9]| ?[^\sA-Za-z0-9]+[\r\n/]*|\s*[\r\n]+|\s+"
WAYS = [[GPT2], [LLAMA], [CAMEL], [r"[0-9]", GPT2], [r"[0-9]{1,3}", r"[x]+", LLAMA], [r"ab|a", r"b"], []]

chars = st.characters(max_codepoint=127)
texts = st.text(st.sampled_from("aAbBsStTx '\"09_-\n\r\t.") | chars, max_size=50)
atoms = st.sampled_from(["a", "b", "[ab]", "[^a]", r"\s", r"\S", ".", "(?:ab|a)", "(?i:A|bc)"])
pieces = st.builds(
    str.__add__, atoms, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}", "{,2}"])
)
sequences = st.builds(
    str.__add__, st.lists(pieces, min_size=1, max_size=4).map("".join), st.sampled_from(["", r"(?!\S)"])
)
expressions = st.lists(sequences, min_size=1, max_size=3).map("|".join)


def by_patterns(ways: list[str]) -> PatternTable:
    return PatternTable([re.compile(f"({way})", re.ASCII) for way in ways])


@pytest.mark.parametrize("ways", WAYS)
@given(text=texts)
def test_texts_are_split_as_pythons_engine_splits_them(ways: list[str], text: str) -> None:
    assert CompiledTable(ways).split(text) == by_patterns(ways).split(text)


@given(expressions, st.lists(st.text(st.sampled_from("aAbBc \n"), max_size=12), min_size=1, max_size=8))
def test_any_expression_that_tables_are_made_of_splits_as_pythons_engine_does(
    expression: str, several: list[str]
) -> None:
    try:
        compiled = CompiledTable([expression])
    except UnsupportedExpression:
        assert (
            re.match(expression, "", re.ASCII) or re.match(expression, "c", re.ASCII) is not None or "{" in expression
        )
        return
    for text in several:
        assert compiled.split(text) == by_patterns([expression]).split(text)


@pytest.mark.parametrize(
    "expression",
    [
        "a*",  # matches nothing
        "a*?b", "a++b", "a{2}?", "a{2}{3}", "a{1000}",  # quantifiers that are not greedy, or too many
        r"\bword", "^a", "a$", r"(?<=x)y", "(?=b)a", r"a(?!bc)", r"(a)\1", "(?P<name>a)", "a)",
    ],
)  # fmt: skip
def test_other_expressions_are_refused_and_left_to_python(expression: str) -> None:
    with pytest.raises((UnsupportedExpression, re.error)):
        automaton(expression)


def test_an_expression_without_tables_is_pythons() -> None:
    assert isinstance(word_table([GPT2]), CompiledTable)
    assert isinstance(word_table([r"(?<=x)y"]), PatternTable)
    assert isinstance(word_table(["a"] * 9), PatternTable)


@pytest.mark.parametrize("make", [CompiledTable, by_patterns])
def test_ids_of_known_words_stand_in_a_row_and_unknown_words_are_told(make: type[CompiledTable]) -> None:
    table: WordTable = make([GPT2])
    assert table.encode("one two one", {}) == ["one", " two", " one"]
    table.add("one", b"0000")
    table.add(" two", b"11112222")
    assert table.encode("one two one", {" one": b"3333"}) == b"0000111122223333"
    assert table.encode("one two three four", {" three": b"4444"}) == [" four"]
    assert table.encode("", {}) == b""
    assert len(table) == 2


@given(st.dictionaries(texts.filter(bool), st.binary(max_size=12), max_size=60), st.lists(texts, max_size=20))
def test_what_is_known_is_known_word_by_word(known: dict[str, bytes], asked: list[str]) -> None:
    compiled, pattern = CompiledTable([]), by_patterns([])
    for word, ids in known.items():
        compiled.add(word, ids)
        pattern.add(word, ids)
    assert len(compiled) == len(pattern) == len(known)
    for text in [*known, *filter(None, asked)]:
        assert compiled.encode(text, {}) == pattern.encode(text, {})


def test_thousands_of_words_are_all_found_again() -> None:
    table = CompiledTable([])
    words = {f"w{number}" * (1 + number % 9): number.to_bytes(4, "little") * (number % 4) for number in range(20_000)}
    for word, ids in words.items():
        table.add(word, ids)
    assert len(table) == len(words)
    assert all(table.encode(word, {}) == ids for word, ids in words.items())
    assert table.encode("w20000", {}) == ["w20000"]


def test_what_is_no_ascii_text_or_no_table_is_refused() -> None:
    splitter = _words.splitter([], 1)
    with pytest.raises(ValueError, match="ASCII"):
        _words.split(splitter, "naïve")
    with pytest.raises(ValueError, match="ASCII"):
        _words.encode(splitter, "naïve", {})
    with pytest.raises(ValueError, match="word"):
        _words.add(splitter, "", b"")
    with pytest.raises(ValueError, match="word"):
        _words.add(splitter, "a" * 65536, b"")
    with pytest.raises(TypeError):
        _words.encode(splitter, b"bytes", {})
    with pytest.raises(TypeError):
        _words.encode(splitter, "a", {"a": 1})
    made = automaton(GPT2)
    for level in [(made.classes[:-1], made.table, made.width), (made.classes, made.table[:-2], made.width),
                  (made.classes, b"\xff\x7f" * made.width * 2, made.width), (made.classes, made.table, 1)]:  # fmt: skip
        with pytest.raises(ValueError, match="table"):
            _words.splitter([level], 1)
    with pytest.raises(ValueError, match="at most"):
        _words.splitter([(made.classes, made.table, made.width)] * 9, 1)
