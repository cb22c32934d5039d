"""Words: whatever is answered is what the library answers, for every real tokenizer and for odd ones."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from engine_adapter import words as words_module
from engine_adapter.words import Words
from tests.samples.encoders import encoder_of

REAL = {"smollm2": None, "qwen3": None, "llama3_1": None, "deepseek_v3": None, "mistral_v3": "mistral-v3"}
PIECES = (
    *("the", " quick", "Brown", "I'll", "can't", "O'NEIL'S", "'s", "x_1", "__init__", "camelCase", "HTTP", "12345"),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\x0b", "\x0c", "\x1c", "\x1f", "\x00", "\x7f", "<", "<e"),
    *("{}", '{"a": 1}', "://", "...", "---", "==>", "$$", "^^", "`", "~", "||", "\\n", "#", "@", "/", "*/", "a" * 100),
)  # fmt: skip


@cache
def real(name: str) -> tuple[Words, Tokenizer]:
    tokenizer = encoder_of(name, REAL[name] or "model").tokenizer
    words = Words.of(tokenizer)
    assert words is not None
    return words, tokenizer


def encoded(words: Words, text: str) -> list[int] | None:
    ids = words.encode(text)
    return None if ids is None else ids.tolist()


def by_library(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", REAL)
def test_texts_of_an_agents_kind_give_the_librarys_ids(name: str) -> None:
    words, tokenizer = real(name)
    chance = random.Random(name)
    for _ in range(500):
        text = "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 40)))
        assert encoded(words, text) == by_library(tokenizer, text), text


@pytest.mark.parametrize("name", REAL)
@given(text=st.text(st.characters(max_codepoint=127), max_size=60))
def test_any_ascii_text_gives_the_librarys_ids_or_is_left_to_it(name: str, text: str) -> None:
    words, tokenizer = real(name)
    ids = encoded(words, text)
    assert ids is None or ids == by_library(tokenizer, text)
    assert ids is not None or any(token.content in text for token in tokenizer.get_added_tokens_decoder().values())


@pytest.mark.parametrize("name", REAL)
def test_added_tokens_other_scripts_and_long_texts_are_left_to_the_library(name: str) -> None:
    words, tokenizer = real(name)
    token = next(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.content.isascii())
    assert [words.encode(text) for text in (f"a{token}b", "naïve", "a " * words_module.MAX_CHARS)] == [None] * 3


def test_gemmas_way_of_splitting_is_left_to_the_library() -> None:
    assert Words.of(encoder_of("gemma3", "model").tokenizer) is None


def test_what_is_remembered_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "_MAX_WORDS", 100)
    tokenizer = encoder_of("smollm2", "model").tokenizer
    words = Words.of(tokenizer)
    assert words is not None
    for number in range(500):
        text = f"w{number} " + "x" * 100
        assert encoded(words, text) == by_library(tokenizer, text)
        assert words.remembered <= 110


def test_long_words_are_not_remembered() -> None:
    words, tokenizer = Words.of(encoder_of("smollm2", "model").tokenizer), encoder_of("smollm2", "model").tokenizer
    assert words is not None
    assert [encoded(words, char * 65) for char in "abc"] == [by_library(tokenizer, char * 65) for char in "abc"]
    assert words.remembered == 0
    assert encoded(words, "a" * 64) == by_library(tokenizer, "a" * 64)
    assert words.remembered == 1


def odd(pre_tokenizer: object, **model: object) -> Tokenizer:
    """A tokenizer of the 256 bytes, which splits as a test wants it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], **model))
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize(
    "tokenizer",
    [
        odd(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        odd(pre_tokenizers.Whitespace()),
        odd(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+"), "isolated"), BYTES])),
        odd(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{Han}+"), "isolated"), BYTES])),
        odd(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"(a)b"), "isolated"), BYTES])),
        odd(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r" "), "removed"), BYTES])),
        odd(BYTES, dropout=0.1),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_tokenizers_that_split_otherwise_are_left_to_the_library(tokenizer: Tokenizer) -> None:
    assert Words.of(tokenizer) is None


def test_words_that_would_be_split_further_alone_are_left_to_the_library() -> None:
    split = pre_tokenizers.Split(Regex(r"a(?!b)|ab|[^a]"), "isolated")
    words = Words.of(odd(pre_tokenizers.Sequence([split, pre_tokenizers.Split(Regex(r"(?<=x)y"), "isolated"), BYTES])))
    assert words is not None
    assert words.encode("abab") is not None
    tokenizer = odd(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(
                    Regex(
                        r"\S+\s?(?=b)|b|.",
                    ),
                    "isolated",
                ),
                BYTES,
            ]
        )
    )
    words = Words.of(tokenizer)
    assert words is not None
    assert words.encode("aa b") is None


def test_segments_beside_tokens_that_eat_white_space_are_the_librarys() -> None:
    tokenizer = odd(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens([AddedToken("<eats>", lstrip=True, rstrip=True, special=True)])
    words = Words.of(tokenizer)
    assert words is not None
    assert words.encode("a <eats> b") is None
