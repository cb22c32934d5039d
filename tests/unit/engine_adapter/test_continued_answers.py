"""An answer that one engine began and another goes on with is the answer that one alone would have given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine_adapter.embedded.answers import AnswerFold
from engine_adapter.embedded.chat import Call, read_chat
from engine_adapter.embedded.constraint import GrammarCompiler, ToolSchema, json_grammar, tool_grammar
from engine_adapter.embedded.detokenize import TokenBytes
from engine_adapter.embedded.errors import RequestError
from engine_adapter.embedded.model import LlamaModel
from engine_adapter.embedded.request import GenerationRequest, SamplingParams, Token
from engine_adapter.embedded.toolcalls import AnswerPart, CallArguments, CallStarted, ContentText
from tests.samples.engines import VOCAB, Answer, assert_nothing_held, load_tiny_model, make_engine, make_tiny_model, run

PROMPT = tuple(3 * n % 150 for n in range(21))
LENGTH = 12


class Runs:
    """A grammar of a kind: after every third token it forces two, and it ends after three runs."""

    def __init__(self) -> None:
        self.accepted, self.runs = list[int](), 0

    def mask(self) -> torch.Tensor | None:
        mask = torch.ones(VOCAB, dtype=torch.bool)
        mask[::2] = len(self.accepted) % 2 == 0  # what may come depends on what came
        return mask

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def advance_forced(self) -> list[int]:
        if len(self.accepted) % 3:
            return []
        self.runs += 1
        return [190 + self.runs, 197]

    @property
    def finished(self) -> bool:
        return self.runs == 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    return load_tiny_model(folder)


def answer(model: LlamaModel, given_ids: tuple[int, ...], *, grammar: bool, **sampling: object) -> Answer:
    """Return what a fresh engine says, behind what is given of the answer."""
    engine, told = make_engine(model, pages=40), Answer()
    params = SamplingParams(**{"max_tokens": LENGTH, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    constraint = Runs() if grammar else None
    engine.submit(
        GenerationRequest("r", PROMPT, params, constraint=constraint, given_ids=given_ids), told.events.append
    )
    run(engine, told)
    assert_nothing_held(engine)
    return told


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.2, "seed": 6, "top_p": 0.8}]
)
@pytest.mark.parametrize("grammar", [False, True])
def test_an_answer_goes_on_from_any_of_its_tokens_as_it_would_have(
    model: LlamaModel, sampling: dict[str, object], grammar: bool
) -> None:
    whole = answer(model, (), grammar=grammar, **sampling)
    assert len(whole.tokens) > 8
    for cut in range(1, len(whole.tokens) + 1):
        rest = answer(model, tuple(whole.tokens[:cut]), grammar=grammar, **sampling)
        assert (whole.tokens[:cut] + rest.tokens, rest.reason) == (whole.tokens, whole.reason), cut


def test_a_stop_token_that_was_given_ends_the_answer(model: LlamaModel) -> None:
    whole = answer(model, (), grammar=False)
    stop = frozenset({whole.tokens[4]})
    ended = answer(model, tuple(whole.tokens[:5]), grammar=False, stop_token_ids=stop)
    assert (ended.tokens, ended.reason) == ([], "stop")


def test_output_that_its_grammar_would_not_have_made_ends_its_request_only(model: LlamaModel) -> None:
    refused = answer(model, (1, 2, 3, 4), grammar=True)  # behind the third token 191 and 197 are due
    assert refused.finished is not None
    assert (refused.reason, refused.finished.error) == ("error", "the given output is none of this grammar")


@pytest.mark.parametrize("given_ids", [(1,) * (LENGTH + 1), (-1,), (VOCAB,)])
def test_output_that_cannot_be_is_refused(model: LlamaModel, given_ids: tuple[int, ...]) -> None:
    with pytest.raises(RequestError):
        answer(model, given_ids, grammar=False)


SCHEMA = {"type": "object", "properties": {"città": {"enum": ["Zürich 🏔️", "Þórshöfn"]}, "n": {"type": "integer"}},
          "required": ["città", "n"], "additionalProperties": False}  # fmt: skip
ANSWERS = {
    "text": (b"", 'Grüße aus "Zürich" 🏔️🏔️, und noch\nmehr STO und STOP hier'),
    "schema": (b"", '{"città": "Zürich 🏔️", "n": 17}'),
    "free": (
        b',"tools":[{"type":"function","function":{"name":"add","parameters":{}}}]',
        'Moment 🏔️ <tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    ),
    "forced": (
        b',"tool_choice":"required","tools":[{"type":"function","function":{"name":"add","parameters":{}}}]',
        '<tool_call>\n{"name": "add", "arguments": {"a": "é🏔️"}}\n</tool_call>',
    ),
}


@given(kind=st.sampled_from(sorted(ANSWERS)), data=st.data())
def test_no_character_and_no_piece_is_lost_or_told_twice(
    tokenizer: Tokenizer, token_bytes: TokenBytes, kind: str, data: st.DataObject
) -> None:
    """The client got some of the pieces; another engine is given the ids up to the last of them, and tells the rest."""
    more, text = ANSWERS[kind]
    stop = b',"stop":["STOP"]' if kind == "text" else b""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    body = b'{"messages":[{"role":"user","content":"?"}]%b%b,"given_output_ids":%b,"given_parts":%d}'

    def call(given_ids: list[int], parts: int) -> Call:
        return read_chat(body % (more, stop, str(given_ids).encode(), parts))

    first = AnswerFold(call([], 0), token_bytes, 5, frozenset())
    delivered, known = list[AnswerPart](), 0
    for at in range(data.draw(st.integers(0, len(ids)))):
        new = first.token(Token(ids[at]))
        if new:
            taken = data.draw(st.integers(1, len(new)))  # the engine may have died between two events of one step
            delivered, known = delivered + new[:taken], at + 1
            if taken < len(new):
                break
    second_call = call(ids[:known], len(delivered))
    second = AnswerFold(second_call, token_bytes, 5, frozenset())
    rest = second.given(second_call.given_ids)
    for token_id in ids[known:]:
        rest += second.token(Token(token_id))
    rest += second.finish("stop")
    alone = AnswerFold(call([], 0), token_bytes, 5, frozenset())
    expected = [part for token_id in ids for part in alone.token(Token(token_id))] + alone.finish("stop")
    assert said(delivered + rest) == said(expected)
    assert second.outcome.completion_tokens == alone.outcome.completion_tokens == len(ids)
    assert second.outcome.finish_reason == alone.outcome.finish_reason


def said(parts: list[AnswerPart]) -> list[object]:
    """Return the parts without ids that are made anew each time, texts that stand side by side joined."""
    joined: list[object] = []
    for part in parts:
        if isinstance(part, ContentText) and joined and isinstance(joined[-1], str):
            joined[-1] += part.text
        elif isinstance(part, ContentText):
            joined.append(part.text)
        elif isinstance(part, CallArguments) and isinstance(joined[-1], tuple) and joined[-1][0] == part.index:
            joined[-1] = (part.index, joined[-1][1] + part.text)
        else:
            joined.append((part.index, part.name if isinstance(part, CallStarted) else part.text))
    return joined


@pytest.fixture(scope="module")
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


@pytest.mark.parametrize("grammar", [json_grammar(SCHEMA), tool_grammar([ToolSchema("add", SCHEMA)], max_calls=2)])
def test_a_real_grammar_starts_inside(model_dir: Path, tokenizer: Tokenizer, grammar: object) -> None:
    """Whatever is chosen among what a grammar allows: taken up from any token, it allows and forces the same."""
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.get_vocab_size(), stop_token_ids=frozenset({2}))
    try:
        whole, seeds = list[int](), torch.Generator().manual_seed(4)
        constraint = compiler.compile(grammar)  # type: ignore[arg-type]
        chosen = list[int]()  # places of tokens that were chosen, not forced
        while not constraint.finished and len(whole) < 60:
            allowed = constraint.mask().nonzero()[:, 0]
            token_id = int(allowed[torch.randint(len(allowed), (1,), generator=seeds)])
            chosen.append(len(whole))
            constraint.accept(token_id)
            whole += [token_id, *constraint.advance_forced()]
        for cut in chosen[1:]:
            inside = compiler.compile(grammar)  # type: ignore[arg-type]
            at = 0
            while at < cut:
                inside.accept(whole[at])
                forced = inside.advance_forced()
                assert whole[at + 1 : at + 1 + len(forced)] == forced
                at += 1 + len(forced)
            assert bool(inside.mask()[whole[cut]])
    finally:
        compiler.close()
