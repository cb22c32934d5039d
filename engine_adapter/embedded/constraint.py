"""Grammars: output that is a JSON value of a schema, or calls of named tools, and nothing else.

llguidance compiles a grammar and says before each token which tokens keep to it. Compiling happens off the event loop
and is bounded in size, number and memory; a grammar that does not compile is the client's error and touches nobody
else.

JSON is written with single spaces behind ``,`` and ``:``, as ``json.dumps`` and the chat templates do: a small model
that may put any white space anywhere sometimes never stops, and an answer that is sent back has the tokens it was
generated as.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import llguidance
import numpy as np
import torch
from tokenizers import Tokenizer

from engine_adapter.embedded.errors import ConstraintError, RequestError
from engine_adapter.embedded.toolcalls import CALL_SEPARATOR, call_closing, call_opening

MAX_SCHEMA_BYTES = 256 << 10
MAX_COMPILING = 64  # grammars that wait for the compiler at once; more are refused
MAX_REMEMBERED = 64  # compiled grammars kept, the least recently used goes
MAX_PARALLEL_CALLS = 8  # calls in one forced answer
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's Lark dialect and the field of the request that asked for it."""

    lark: str
    param: str


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """What a forced call needs to know of a tool. ``strict`` refuses schema keywords that cannot be enforced."""

    name: str
    parameters: Mapping[str, object]
    strict: bool = False


def json_grammar(schema: Mapping[str, object] | None, *, param: str = "response_format") -> Grammar:
    """Return the grammar of one JSON value of ``schema``; ``None`` is any object.

    Raises ``RequestError`` for a schema that is too large. Whether it is a schema shows when it is compiled.
    """
    return Grammar(f"start: value\nvalue: %json {_schema_text(schema or {'type': 'object'}, True, param)}\n", param)


def tool_grammar(tools: Sequence[ToolSchema], *, max_calls: int) -> Grammar:
    """Return the grammar of one to ``max_calls`` calls of these tools, in the form of ``toolcalls``."""
    rules, names = [], []
    for index, tool in enumerate(tools):
        opening, closing = json.dumps(call_opening(tool.name)), json.dumps(call_closing())
        rules.append(f"call_{index}: {opening} arguments_{index} {closing}")
        rules.append(f"arguments_{index}: %json {_schema_text(_object_schema(tool), tool.strict, 'tools')}")
        names.append(f"call_{index}")
    more = f" ({json.dumps(CALL_SEPARATOR)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    return Grammar("\n".join([f"start: call{more}", f"call: {' | '.join(names)}", *rules, ""]), "tools")


class TokenConstraint:
    """One sequence's place in a grammar; the ``Constraint`` of the engine, used from its thread only."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> torch.Tensor:
        """Return which tokens may come next, bool (vocab,). Raises ``ConstraintError`` past a parser's limit."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) != 0
        self._check()
        return torch.from_numpy(allowed)

    def accept(self, token_id: int) -> None:
        """Advance. Raises ``ConstraintError`` for a token that the mask did not allow."""
        self._matcher.consume_token(token_id)
        self._check()

    def advance_forced(self) -> list[int]:
        """Advance by the tokens that the grammar leaves no choice about and return them, in canonical tokenization."""
        forced: list[int] = self._matcher.compute_ff_tokens()
        for token_id in forced:
            self.accept(token_id)
        return forced

    @property
    def finished(self) -> bool:
        """The grammar is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the output could not be constrained: {_in_short(self._matcher.get_error())}")


class GrammarCompiler:
    """Makes constraints for one tokenizer. ``compile`` may be called from any thread; ``close`` ends its own."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        """``vocab_size`` is the model's, which may be padded beyond the tokenizer's."""
        self._tokenizer, self._vocab_size, self._stops = tokenizer, vocab_size, sorted(stop_token_ids)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting = 0

    async def compile_soon(self, grammar: Grammar) -> TokenConstraint:
        """Compile on the compiler's thread. Raises as ``compile`` and ``RequestError`` when too many wait already."""
        if self._waiting >= MAX_COMPILING:
            raise RequestError("too many grammars are being compiled; try again", param=grammar.param, code="busy")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self.compile, grammar)
        finally:
            self._waiting -= 1

    def compile(self, grammar: Grammar) -> TokenConstraint:
        """Return a fresh constraint. Raises ``RequestError`` where the grammar does not compile."""
        with self._lock:
            known = self._compiled.get(grammar.lark)
            if known is not None:
                self._compiled.move_to_end(grammar.lark)
                return TokenConstraint(known.deep_copy())
        matcher = llguidance.LLMatcher(self.vocabulary(), grammar.lark, log_level=0)
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_logit_bias()  # some grammars compile, and fail at their first token
        if first.is_error():
            reason = _in_short(first.get_error())
            raise RequestError(f"the schema cannot be used: {reason}", param=grammar.param, code="invalid_schema")
        with self._lock:
            self._compiled[grammar.lark] = matcher
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return TokenConstraint(matcher.deep_copy())

    def vocabulary(self) -> llguidance.LLTokenizer:
        """Return llguidance's view of the tokenizer, made on the first call (a second or so)."""
        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._stops
            )
        return self._vocabulary

    def close(self) -> None:
        """Stop the compiler's thread. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _in_short(reason: str) -> str:
    """Return what a parser says, less its state and its backtrace."""
    return " ".join(re.split(r"<(?:state|backtrace)>|\\n", reason, maxsplit=1)[0].split())[:300]


def _object_schema(tool: ToolSchema) -> Mapping[str, object]:
    """Arguments are always an object, whatever the schema forgot to say; a missing schema means no arguments."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}


def _schema_text(schema: Mapping[str, object], strict: bool, param: str) -> str:
    try:
        text = json.dumps({**schema, "x-guidance": {**_LAYOUT, "lenient": not strict}})
    except RecursionError as error:
        raise RequestError("the schema is nested too deeply", param=param, code="invalid_schema") from error
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestError(f"the schema is over {MAX_SCHEMA_BYTES} bytes", param=param, code="invalid_schema")
    return text
