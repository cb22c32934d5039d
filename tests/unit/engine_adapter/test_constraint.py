"""Grammars: what they let through, what they refuse, and that a bad one is its sender's error alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine_adapter.embedded import constraint as constraint_module
from engine_adapter.embedded.constraint import (
    GrammarCompiler,
    TokenConstraint,
    ToolSchema,
    json_grammar,
    tool_grammar,
)
from engine_adapter.embedded.errors import ConstraintError, RequestError
from engine_adapter.prompt import PromptEncoder

pytestmark = pytest.mark.model
ADD = ToolSchema(
    "add",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a", "note"],
        "additionalProperties": False,
    },
)


@pytest.fixture(scope="module")
def compiler(encoder: PromptEncoder) -> Any:
    compiler = GrammarCompiler(encoder.tokenizer, vocab_size=encoder.vocab_size, stop_token_ids=encoder.stop_token_ids)
    yield compiler
    compiler.close()


def walk(constraint: TokenConstraint, ids: list[int]) -> bool:
    """Tell whether the grammar allows these tokens in this order."""
    for token_id in ids:
        if not constraint.mask()[token_id]:
            return False
        constraint.accept(token_id)
    return True


def test_the_mask_has_the_models_vocabulary_and_allows_one_opening(
    compiler: GrammarCompiler, encoder: PromptEncoder
) -> None:
    constraint = compiler.compile(tool_grammar([ADD], max_calls=1))
    mask = constraint.mask()
    assert mask.shape == (encoder.vocab_size,)
    allowed = {encoder.tokenizer.id_to_token(i) for i in mask.nonzero().flatten().tolist()}
    assert allowed
    assert all("<tool_call>".startswith(str(token)) for token in allowed)


@given(
    a=st.integers(-(10**9), 10**9),
    note=st.text(
        st.characters(max_codepoint=0x2FFFF, exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=20
    ).filter(lambda note: "<|" not in note),  # control tokens are no text, and no grammar lets them through
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_valid_call_in_the_templates_form_passes(
    compiler: GrammarCompiler, tokenizer: Tokenizer, a: int, note: str
) -> None:
    arguments = json.dumps({"a": a, "note": note}, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    constraint = compiler.compile(tool_grammar([ADD], max_calls=1))
    assert walk(constraint, tokenizer.encode(text).ids)
    assert constraint.finished


@pytest.mark.parametrize(
    "text",
    [
        "I will call add.",
        '<tool_call>\n{"name": "sub", "arguments": {',
        '<tool_call>\n{"name": "add", "arguments": {"a": "one"',
        '<tool_call>\n{"name": "add", "arguments": {"a":     ',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "x"}}\n</tool_call>\n<tool_call>',
    ],
)
def test_anything_else_is_not_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    assert not walk(compiler.compile(tool_grammar([ADD], max_calls=1)), tokenizer.encode(text).ids)


def test_several_calls_where_they_are_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = tool_grammar([ADD, ToolSchema("noop", {})], max_calls=2)
    call = '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
    one = compiler.compile(grammar)
    assert walk(one, tokenizer.encode(call).ids)
    assert not one.finished
    end = tokenizer.token_to_id("<|im_end|>")
    assert one.mask()[end]
    two = compiler.compile(grammar)
    assert walk(two, tokenizer.encode(f"{call}\n{call}").ids)
    assert two.finished


def test_two_constraints_of_one_grammar_do_not_share_their_place(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = json_grammar({"type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"]})
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    assert walk(first, tokenizer.encode('{"x": "p"').ids)
    assert walk(second, tokenizer.encode('{"x": "q"').ids)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"type": "object", "properties": 3},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "("},
        {"type": "object", "unevaluatedProperties": False, "allOf": [{"not": {}}]},
    ],
)
def test_a_schema_that_is_none_is_the_clients_error(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(json_grammar(schema))
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_schema")


def test_a_schema_too_large_or_too_deep_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(RequestError, match="bytes"):
        json_grammar({"enum": ["x" * constraint_module.MAX_SCHEMA_BYTES]})
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"properties": deep}
    with pytest.raises(RequestError, match="deeply"):
        json_grammar(deep)


def test_a_token_that_the_mask_forbids_ends_the_sequence_with_an_error(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    constraint = compiler.compile(json_grammar(None))
    with pytest.raises(ConstraintError):
        constraint.accept(tokenizer.encode("x").ids[0])
    with pytest.raises(ConstraintError):
        constraint.mask()


def test_compiled_grammars_are_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_module, "MAX_REMEMBERED", 3)
    for number in range(10):
        compiler.compile(json_grammar({"const": number}))
    assert len(compiler._compiled) == 3


async def test_more_waiting_grammars_than_allowed_are_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_module, "MAX_COMPILING", 2)
    wanted = [compiler.compile_soon(json_grammar({"const": f"c{number}"})) for number in range(3)]
    results = await asyncio.gather(*wanted, return_exceptions=True)
    assert [type(result) for result in results] == [TokenConstraint, TokenConstraint, RequestError]
    assert isinstance(await compiler.compile_soon(json_grammar({"const": "again"})), TokenConstraint)


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_a_schema_that_fails_at_its_first_token_is_its_clients_mistake(
    compiler: GrammarCompiler, schema: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match="the schema cannot be used") as refused:
        compiler.compile(json_grammar(schema))
    assert refused.value.code == "invalid_schema"
    assert len(str(refused.value)) < 400
    assert "state>" not in str(refused.value)
