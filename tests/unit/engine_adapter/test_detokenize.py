"""Streaming text: whole characters, stop strings across tokens, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine_adapter.embedded.detokenize import TextStream, TokenBytes, overlap

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SMALL = st.text(alphabet="ab\n", max_size=12)


@pytest.fixture(scope="module")
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


def byte_tokens(text: bytes) -> list[int]:
    return list(text)


@pytest.fixture(scope="module")
def single_bytes() -> TokenBytes:
    """A vocabulary of the 256 bytes, each its own token, so that text can be cut anywhere."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0x00>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return TokenBytes(tokenizer)


def read(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.feed(i) for i in ids), stream.finish()]


@pytest.mark.model
@given(text=st.text(max_size=60))
@relaxed
def test_any_text_comes_back_from_its_tokens(tokenizer: Tokenizer, token_bytes: TokenBytes, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assume(tokenizer.decode(ids) == text)  # this vocabulary lacks a few bytes, all of unassigned planes
    assert "".join(read(TextStream(token_bytes), ids)) == text


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
@relaxed
def test_any_ids_give_the_text_of_the_tokenizers_own_decoder(
    tokenizer: Tokenizer, token_bytes: TokenBytes, ids: list[int]
) -> None:
    assert "".join(read(TextStream(token_bytes), ids)) == tokenizer.decode(ids)


@pytest.mark.model
def test_special_tokens_and_padded_ids_have_no_text(token_bytes: TokenBytes, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    assert read(TextStream(token_bytes), [end, 10**6]) == ["", "", ""]


@given(text=st.text(max_size=30))
@relaxed
def test_a_character_comes_whole_wherever_its_bytes_are_cut(single_bytes: TokenBytes, text: str) -> None:
    data = text.encode()
    pieces = read(TextStream(single_bytes), byte_tokens(data))
    assert "".join(pieces) == text
    ends = {len(text[:length].encode()) for length in range(len(text) + 1)}
    for count in range(len(data) + 1):
        so_far = "".join(pieces[:count]).encode()
        assert len(so_far) == max(end for end in ends if end <= count)


def test_a_character_that_never_ends_is_replaced(single_bytes: TokenBytes) -> None:
    assert read(TextStream(single_bytes), byte_tokens(b"a\xf0\x9f\xa4")) == ["a", "", "", "", "\ufffd"]
    assert "".join(read(TextStream(single_bytes), byte_tokens(b"\xffb"))) == "\ufffdb"


@given(text=SMALL, stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3))
@relaxed
def test_stop_strings_cut_exactly_and_nothing_else_is_lost(
    single_bytes: TokenBytes, text: str, stops: list[str]
) -> None:
    stream = TextStream(single_bytes, stops)
    told = ""
    for token in byte_tokens(text.encode()):
        told += stream.feed(token)
        assert not any(stop in told for stop in stops)
    told += stream.finish()
    # The first stop string to be complete ends the answer; of several that end together the earliest beginning wins.
    end = next((n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)), None)
    if end is None:
        assert (told, stream.matched_stop) == (text, None)
    else:
        start = min(end - len(s) for s in stops if text[:end].endswith(s))
        assert (told, stream.matched_stop) == (text[:start], text[start:end])


@pytest.mark.model
def test_a_stop_string_across_tokens_is_held_back_and_found(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    ids = tokenizer.encode("one two\n\nObservation: three").ids
    stream = TextStream(token_bytes, ["\nObservation:"])
    assert "".join(stream.feed(i) for i in ids) + stream.finish() == "one two\n"
    assert stream.matched_stop == "\nObservation:"


def test_what_might_have_become_a_stop_string_is_given_at_the_end(single_bytes: TokenBytes) -> None:
    stream = TextStream(single_bytes, ["STOP", ""])
    assert [stream.feed(i) for i in b"aSTO"] == ["a", "", "", ""]
    assert stream.finish() == "STO"
    assert stream.matched_stop is None


@given(text=st.text(alphabet="ab", max_size=8), mark=st.text(alphabet="ab", min_size=1, max_size=5))
def test_overlap_is_the_longest_true_beginning(text: str, mark: str) -> None:
    lengths = [n for n in range(len(mark)) if text.endswith(mark[:n])]
    assert overlap(text, mark) == max(lengths)


@pytest.mark.model
def test_metaspace_tokens_are_read(model_dir: Path) -> None:
    vocabulary = {"▁a": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁a"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert json.loads(tokenizer.to_str())["decoder"]["type"] == "Sequence"
    assert read(TextStream(TokenBytes(tokenizer)), [0, 1, 2, 3]) == [" a", "", "", "你", ""]
