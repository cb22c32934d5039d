"""Real models' templates and tokenizers: equal to the reference, no role can be forged, and resuming changes nothing.

The tokenizers are fetched into the user's cache (``tests/model_tokenizers.py``); what could not be fetched is skipped
with the command that brings it.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_adapter.messages import for_model_template
from engine_adapter.model_templates import NAMED_FOR, choose_template
from engine_adapter.prompt import PromptEncoder, PromptError, PromptOptions
from tests.samples.chats import TOOLS, call, conversation, text
from tests.samples.encoders import encoder_of, folder_of

pytestmark = pytest.mark.model

HUGGING_FACE = ("smollm2", "qwen3", "llama3_1", "deepseek_v3", "gemma3")
MODELS = (*HUGGING_FACE, "mistral_v3")
NAMED = {
    "smollm2": "chatml-tools",
    "qwen3": "chatml-tools",
    "llama3_1": "llama3-tools",
    "deepseek_v3": "deepseek-v3-tools",
    "gemma3": "gemma3-tools",
    "mistral_v3": "mistral-v3",
}
CHATS = int(os.environ.get("KEEPWARM_CORPUS", "60"))
EVERY_TEMPLATE = [(name, "model") for name in HUGGING_FACE] + [*NAMED.items()]


@cache
def reference_of(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder_of(name))


def as_engines_send(chat: list[dict[str, Any]], null_as_empty: bool) -> list[dict[str, Any]]:
    """What engines hand to transformers: arguments by value, no null members; SGLang's empty content is an option."""
    return for_model_template(copy.deepcopy(chat), null_as_empty=null_as_empty)


def rendered(reference: Any, chat: list[dict[str, Any]], tools: Any, **options: Any) -> list[int] | None:
    """The reference's ids, ``None`` where its template refuses."""
    try:
        ids: list[int] = reference.apply_chat_template(chat, tools, tokenize=True, return_dict=False, **options)
    except Exception:  # whatever a published template does with data that it did not expect
        return None
    return ids


def test_arguments_that_no_parser_follows_stay_text() -> None:
    for arguments in ('{"a":' * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "{"):
        sent = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        assert for_model_template([sent], null_as_empty=False) == [sent]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_chats_give_the_ids_of_transformers(name: str) -> None:
    encoder, reference, chance = encoder_of(name, "model"), reference_of(name), random.Random(name)
    null_as_empty = encoder._choice.null_as_empty
    compared = refused = 0
    for number in range(CHATS):
        calls, reasoning, null_content = number % 2 == 1, number % 3 == 0, number % 4 < 2
        turns = chance.randrange(5)
        chat = conversation(chance, turns=turns, calls=calls, reasoning=reasoning, null_content=null_content)
        tools = TOOLS if number % 4 in (1, 2) else None
        generation = number % 5 > 0
        wanted = rendered(reference, as_engines_send(chat, null_as_empty), tools, add_generation_prompt=generation)
        options = PromptOptions(add_generation_prompt=generation)
        if wanted is None:
            refused += 1
            with pytest.raises(PromptError):
                encoder.encode_chat_hashed(chat, tools, options=options)
            continue
        compared += 1
        assert encoder.encode_chat_hashed(chat, tools, options=options).ids.tolist() == wanted, chat
    assert compared >= CHATS * (0.45 if name in ("gemma3", "deepseek_v3") else 0.9), (compared, refused)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_last_message_is_continued_as_transformers_does(name: str) -> None:
    encoder, reference, chance = encoder_of(name, "model"), reference_of(name), random.Random(name)
    for _ in range(CHATS // 4):
        chat = conversation(chance, turns=chance.randint(1, 3), calls=False, ends_with=("assistant",))
        chat[-1]["content"] += chance.choice(["", " ", "\n", "  x "])
        wanted = rendered(reference, chat, None, continue_final_message=True)
        assert wanted is not None
        options = PromptOptions(continue_final_message=True)
        assert encoder.encode_chat_hashed(chat, options=options).ids.tolist() == wanted, chat


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_parts_are_joined_unless_the_template_reads_them(name: str) -> None:
    encoder, reference, chance = encoder_of(name, "model"), reference_of(name), random.Random(name)
    reads_parts = name == "gemma3"
    for _ in range(CHATS // 4):
        chat = conversation(chance, turns=2, calls=False, in_parts=True)
        plain = copy.deepcopy(chat)
        for message in plain:
            if isinstance(message["content"], list) and not reads_parts:
                message["content"] = "\n".join(part["text"] for part in message["content"])
        wanted = rendered(reference, plain, None, add_generation_prompt=True)
        assert encoder.encode_chat(chat) == wanted, chat


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_raw_text_gives_the_ids_of_the_tokenizer_markers_included(name: str) -> None:
    encoder, reference, chance = encoder_of(name, "model"), reference_of(name), random.Random(name)
    markers = sorted(encoder._markers.tokens)
    for _ in range(CHATS):
        raw = text(chance) + chance.choice(markers) + text(chance) + chance.choice(markers) + text(chance)
        assert encoder.encode_text(raw) == reference(raw)["input_ids"], raw


def test_qwen3_takes_the_variables_of_its_template() -> None:
    encoder, reference = encoder_of("qwen3", "model"), reference_of("qwen3")
    chat = [{"role": "user", "content": "x"}]
    for thinking in (True, False):
        wanted = rendered(reference, chat, None, add_generation_prompt=True, enable_thinking=thinking)
        options = PromptOptions(variables={"enable_thinking": thinking})
        assert encoder.encode_chat_hashed(chat, options=options).ids.tolist() == wanted


@cache
def mistral_reference() -> Callable[[list[dict[str, Any]], Any], list[int]]:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    tokenizer = mistral.MistralTokenizer.from_file(str(folder_of("mistral_v3") / "tekken.json"))

    def encode(chat: list[dict[str, Any]], tools: Any) -> list[int]:
        request = ChatCompletionRequest.from_openai(messages=copy.deepcopy(chat), tools=copy.deepcopy(tools))
        tokens: list[int] = tokenizer.encode_chat_completion(request).tokens
        return tokens

    return encode


def test_mistral_chats_give_the_ids_of_mistral_common() -> None:
    encoder, reference, chance = encoder_of("mistral_v3", "mistral-v3"), mistral_reference(), random.Random(3)
    compared = 0
    for number in range(CHATS):
        chat = conversation(chance, turns=chance.randrange(5), calls=number % 2 == 1)
        if any(a["role"] == b["role"] == "assistant" for a, b in pairwise(chat)):
            continue
        if any(a["role"] == "tool" and b["role"] == "user" for a, b in pairwise(chat)):
            continue
        if number % 6 == 0 and chat[-1]["role"] == "user":
            chat.append({"role": "user", "content": "and " + text(chance)})
        tools = TOOLS if number % 3 else None
        assert encoder.encode_chat(chat, tools) == reference(chat, tools), chat
        compared += 1
    assert compared > CHATS * 0.7


@pytest.mark.parametrize(("name", "template"), EVERY_TEMPLATE)
def test_no_role_can_be_forged(name: str, template: str) -> None:
    encoder, chance = encoder_of(name, template), random.Random(name)
    markers = sorted(token for token in encoder._markers.tokens if token in written(encoder)) or sorted(
        encoder._markers.tokens
    )
    every = {encoder.tokenizer.token_to_id(token) for token in encoder._markers.tokens}
    flagged = {number for number, token in encoder.tokenizer.get_added_tokens_decoder().items() if token.special}
    tried = 0
    for number in range(40):
        evil = "".join(chance.choice(markers) + chance.choice(["", "system\n", "\n", " "]) for _ in range(4))
        honest, faked = [forged(word, number % 5, encoder) for word in ("harmless", f"x{evil}y")]
        if honest is None:
            continue
        assert faked is not None
        tried += 1
        # an answer's own <think> and <tool_call> count: templates take answers apart at them, and they fake no role
        control = every & flagged if number % 5 == 2 else every
        assert [i for i in faked if i in control] == [i for i in honest if i in control], evil
    assert tried >= 16


def written(encoder: PromptEncoder) -> str:
    return encoder._choice.template.literal_text()


def forged(word: str, place: int, encoder: PromptEncoder) -> list[int] | None:
    """The ids of a chat with ``word`` at one of several places, ``None`` where the template refuses such chats."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    tools = None
    if place == 0:
        chat[1]["content"] = word
    elif place == 1:
        chat[0]["content"] = word
    elif place == 2:
        chat += [{"role": "assistant", "content": word}, {"role": "user", "content": [{"type": "text", "text": word}]}]
    elif place == 3:
        made = call(random.Random(1), 1)
        made["function"] = {"name": "add", "arguments": json.dumps({word: word})}
        chat.append({"role": "assistant", "content": None, "tool_calls": [made]})
        chat.append({"role": "tool", "tool_call_id": made["id"], "name": "add", "content": word})
    else:
        tools = [{"type": "function", "function": {"name": "add", "description": word, "parameters": {word: word}}}]
    try:
        return encoder.encode_chat(chat, tools)
    except PromptError:
        return None


@pytest.mark.parametrize(("name", "template"), EVERY_TEMPLATE)
def test_going_on_from_a_known_conversation_changes_nothing(name: str, template: str) -> None:
    encoder, chance = encoder_of(name, template), random.Random(name)
    forgetful = copy.copy(encoder)
    from engine_adapter.conversations import ConversationMemo

    forgetful._conversations = ConversationMemo(0)
    before = encoder.conversation_stats().resumed
    steps = 0
    for number in range(12):
        chat = conversation(chance, turns=8, calls=template != "model" or name in ("qwen3", "smollm2"), reasoning=True)
        tools = TOOLS if number % 2 else None
        lengths = [at + 1 for at, message in enumerate(chat) if message["role"] in ("user", "tool")]
        for length in [*lengths, *chance.sample(lengths, min(2, len(lengths)))]:
            asked = chat[:length]
            if chance.random() < 0.1:
                asked = [*asked[:-1], {**asked[-1], "content": "another " + text(chance)}]
            try:
                whole = forgetful.encode_chat_hashed(asked, tools, seed=number, block_sizes=[1, 16])
            except PromptError:
                with pytest.raises(PromptError):
                    encoder.encode_chat_hashed(asked, tools, seed=number, block_sizes=[1, 16])
                continue
            steps += 1
            resumed = encoder.encode_chat_hashed(asked, tools, seed=number, block_sizes=[1, 16])
            assert resumed.ids.tolist() == whole.ids.tolist(), asked
            for size in (1, 16):
                assert resumed.hashes[size].tolist() == whole.hashes[size].tolist()
    assert forgetful.conversation_stats().conversations == 0
    assert encoder.conversation_stats().resumed - before > steps // 3


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_show_tools_gets_the_named_template_of_its_tokens(name: str) -> None:
    folder = folder_of(name)
    encoder = encoder_of(name, "model" if name == "qwen3" else NAMED[name])
    choice = choose_template(folder, encoder.tokenizer, None)
    assert choice.template.name == ("model" if name == "qwen3" else NAMED[name])


@pytest.mark.parametrize(("name", "template"), NAMED.items())
def test_named_templates_show_what_published_ones_lose(name: str, template: str) -> None:
    encoder = encoder_of(name, template)
    made = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call00001", "content": "result"},
    ]
    ids = encoder.encode_chat(chat, TOOLS)
    shown = encoder.tokenizer.decode(ids, skip_special_tokens=False)
    for wanted in ("be brief", "first\nsecond", "Adds <b>two</b> & more", '{"a": 1}', "result", "“things”"):
        assert wanted in shown
    if template != "mistral-v3":  # which puts tools and system text into the last user message, as its reference does
        longer = [*chat, {"role": "assistant", "content": " and so"}, {"role": "user", "content": "more"}]
        assert encoder.encode_chat(longer, TOOLS)[: len(ids)] == ids


def test_every_named_template_is_documented_and_chosen_by_tokens() -> None:
    from engine_adapter.template import TEMPLATE_FOLDER, named_templates

    readme = (TEMPLATE_FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(NAMED_FOR) == set(named_templates())
    for name in named_templates():
        assert f"## `{name}`" in readme


def test_a_tokenizer_of_tekken_keeps_its_control_tokens_apart() -> None:
    tokenizer: Tokenizer = encoder_of("mistral_v3", "mistral-v3").tokenizer
    assert [tokenizer.token_to_id(token) for token in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")] == [0, 1, 2, 3, 4]
    assert tokenizer.get_vocab_size() == 131072
