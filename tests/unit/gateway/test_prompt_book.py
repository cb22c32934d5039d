"""The book of prompts: exact where ids can be known, by text and labelled so elsewhere, and never in anybody's way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gateway import prompts as module
from gateway.agreement import Agreement, AgreementOptions
from gateway.errors import BadRequest
from gateway.prompt_rules import PromptRules
from gateway.prompts import Prompt, PromptBook
from gateway.protocols.openai import read_ask

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "hello there, how are you today?" * 4}
REPLY = [{"role": "assistant", "content": "well"}, {"role": "user", "content": "good to hear that" * 9}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 40}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that makes one token of a byte, with two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


@pytest.fixture
async def book(folder: Path) -> Any:
    book = PromptBook(agreement=Agreement(AgreementOptions(least_answers=8)))
    assert await book.load("m", folder, "model")
    yield book
    book.close()


async def prompt_of(
    book: PromptBook, *, model: str = "m", salt: str | None = None, rules: PromptRules | None = None, **members: Any
) -> Prompt | None:
    endpoint = "completions" if "prompt" in members else "chat"
    body = json.dumps({"model": model, **members}).encode()
    return await book.encode(model, read_ask(body, endpoint), salt, {4, 16}, body, rules=rules)


async def test_a_chat_is_exact_and_its_hashes_go_on(book: PromptBook) -> None:
    first = await prompt_of(book, messages=[USER])
    second = await prompt_of(book, messages=[USER, *REPLY])
    assert first is not None
    assert second is not None
    assert (first.is_exact, first.is_counted, first.is_comparable) == (True, True, True)
    assert first.tokens == len(f"<>user\n{USER['content']}<>\n<>assistant\n") - 3
    for size in (4, 16):
        known = list(first.hashes[size])
        assert len(known) == first.tokens // size
        assert list(second.hashes[size])[: len(known)] == known


async def test_salts_part_prompts_of_every_kind(book: PromptBook) -> None:
    for members in ({"messages": [USER]}, {"prompt": [1] * 40}, {"model": "unknown", "messages": [USER]}):
        hashes = [await prompt_of(book, salt=salt, **members) for salt in (None, "a")]
        assert hashes[0] is not None
        assert hashes[1] is not None
        assert set(hashes[0].hashes[4]).isdisjoint(hashes[1].hashes[4])


async def test_without_a_tokenizer_the_text_is_hashed_and_labelled_so(book: PromptBook) -> None:
    first = await prompt_of(book, model="unknown", messages=[USER])
    second = await prompt_of(book, model="unknown", messages=[USER, *REPLY])
    other = await prompt_of(book, model="unknown", messages=[{**USER, "role": "system"}])
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.is_exact, first.is_counted, first.is_comparable) == (False, False, False)
    assert list(second.hashes[16])[: len(first.hashes[16])] == list(first.hashes[16])
    assert len(first.hashes[16]) > 0
    assert set(other.hashes[4]).isdisjoint(first.hashes[4])


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [USER], "chat_template": "{{ messages }}"},
        {"messages": [USER], "documents": [{"text": "x"}]},
        {"messages": [USER], "chat_template_kwargs": "x"},
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
    ],
)
async def test_what_only_the_engine_can_know_is_not_exact(book: PromptBook, members: dict[str, Any]) -> None:
    prompt = await prompt_of(book, **members)
    assert prompt is not None
    assert not prompt.is_exact
    assert not prompt.is_counted


async def test_media_enter_by_content_at_their_place(book: PromptBook) -> None:
    def chat(pixel: str) -> list[dict[str, Any]]:
        image = {"type": "image_url", "image_url": {"url": f"data:{pixel * 100}"}}
        return [USER, {"role": "user", "content": [image, {"type": "text", "text": "what is this? " * 8}]}]

    one, same, other = [await prompt_of(book, messages=chat(pixel)) for pixel in "AAB"]
    assert one is not None
    assert same is not None
    assert other is not None
    assert list(one.hashes[4]) == list(same.hashes[4])
    shared = [a == b for a, b in zip(one.hashes[4], other.hashes[4], strict=True)]
    assert shared == sorted(shared, reverse=True)
    assert 8 <= sum(shared) < len(shared) - 8  # the message before the image, and nothing behind it


async def test_markers_make_a_count_that_is_not_compared_and_it_stays_so(book: PromptBook) -> None:
    marked = [{"role": "user", "content": "<|im_end|> is a token"}]
    for messages in (marked, [*marked, *REPLY]):
        prompt = await prompt_of(book, messages=messages)
        assert prompt is not None
        assert prompt.is_exact
        assert not prompt.is_comparable


async def test_engines_that_count_otherwise_take_a_model_to_its_text_until_they_agree(book: PromptBook) -> None:
    exact = await prompt_of(book, messages=[USER])
    for _ in range(8):
        book.answered("m", agrees=False)
    assert book.agreement("m").disagreement_rate == 1
    doubted = await prompt_of(book, messages=[USER])
    assert exact is not None
    assert doubted is not None
    assert not doubted.is_exact
    assert (doubted.is_counted, doubted.is_comparable, doubted.tokens) == (True, True, exact.tokens)
    assert set(doubted.hashes[4]).isdisjoint(exact.hashes[4])
    for _ in range(64):
        book.answered("m", agrees=True)
    assert (await prompt_of(book, messages=[USER])) is not None
    again = await prompt_of(book, messages=[USER])
    assert again is not None
    assert again.is_exact


@pytest.mark.parametrize("ids", [[1, 2**40], [1, 258], [-1]])
async def test_ids_that_are_no_tokens_of_the_model_never_reach_an_engine(book: PromptBook, ids: list[int]) -> None:
    """One of them takes a whole SGLang server down."""
    with pytest.raises(BadRequest, match="257") as refused:
        await prompt_of(book, prompt=ids)
    assert (refused.value.param, refused.value.code) == ("prompt", "out_of_vocabulary")
    with pytest.raises(BadRequest) as refused:
        await prompt_of(book, messages=[USER], input_ids=ids, rules=PromptRules(takes_ids=True))
    assert refused.value.param == "input_ids"
    unknown = await prompt_of(book, model="unknown", prompt=ids)
    assert unknown is None or unknown.tokens == len(ids) or not unknown.is_exact


async def test_a_long_prompt_leaves_the_event_loop_free(book: PromptBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is made, the loop turns; and a short prompt that comes later is there first."""
    text = "all work and no play makes an engine a dull toy\n" * 30_000
    long = asyncio.create_task(prompt_of(book, messages=[{"role": "user", "content": text}]))
    turns = 0
    while not long.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 3:
            short = await prompt_of(book, messages=[{"role": "user", "content": "x" * 5000}])
            assert short is not None
            assert not long.done()
    assert turns > 50
    assert long.result().tokens > len(text)
    monkeypatch.setattr(module, "MAX_EXACT_BYTES", 1 << 16)
    cut = await prompt_of(book, messages=[{"role": "user", "content": text}])
    assert cut is not None
    assert not cut.is_exact


async def test_too_much_that_waits_is_not_waited_for(book: PromptBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 10_000)
    message = {"role": "user", "content": "y" * 9000}
    results = await asyncio.gather(*(prompt_of(book, messages=[message]) for _ in range(3)))
    assert [result is None for result in results] == [False, True, True]
    assert await prompt_of(book, messages=[message]) is not None
