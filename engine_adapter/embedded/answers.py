"""What the engine said, as OpenAI's answers and stream chunks: pure values in, JSON values out.

Sources: OpenAI's API reference; SGLang 0.5.23 for ``sglext.cached_tokens_details``, ``sglext.output_ids``,
``matched_stop`` and the shape of errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_adapter.embedded.chat import Call
from engine_adapter.embedded.detokenize import TextStream, TokenBytes
from engine_adapter.embedded.request import FinishReason, Token
from engine_adapter.embedded.toolcalls import (
    AnswerParser,
    AnswerPart,
    CallArguments,
    CallStarted,
    ContentText,
    ForcedCalls,
    FreeCalls,
    PlainText,
)

STORAGE_BACKEND = "keepwarm"
Json = dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """How an answer came out so far."""

    prompt_tokens: int
    hit_tokens: tuple[int, int, int, int] = (0, 0, 0, 0)  # device, host, disk, pool
    completion_tokens: int = 0
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] = field(default_factory=list)

    def usage(self) -> Json:
        """Return OpenAI's ``usage``; the prompt's cached tokens are those of all tiers."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.hit_tokens)},
        }

    def admitted(self, hit_tokens: tuple[int, int, int, int]) -> None:
        """Take in the hits of the prompt. Those behind it, in output that was given, are no tokens of this bill."""
        left, counted = self.prompt_tokens, []
        for tokens in hit_tokens:
            counted.append(min(tokens, left))
            left -= counted[-1]
        device, host, disk, pool = counted
        self.hit_tokens = (device, host, disk, pool)

    def extension(self, call: Call) -> Json:
        """Return what ``call`` asked for of ``sglext``.

        The cached tokens by tier (``storage`` is what SGLang calls all below the host), and the ids of the output, the
        token that ended it included.
        """
        found: Json = {}
        if call.cached_details:
            device, host, disk, pool = self.hit_tokens
            found["cached_tokens_details"] = {
                "device": device,
                "host": host,
                "storage": disk + pool,
                "storage_backend": STORAGE_BACKEND,
                "disk": disk,
                "pool": pool,
            }
        if call.output_ids:
            found["output_ids"] = [self.token_ids]
        return found


class AnswerFold:
    """Folds the tokens of one answer into its parts and its outcome."""

    def __init__(self, call: Call, token_bytes: TokenBytes, prompt_tokens: int, stop_token_ids: frozenset[int]) -> None:
        self.outcome = Outcome(prompt_tokens)
        self._stream = TextStream(token_bytes, call.stop)
        self._stops = stop_token_ids
        self._parser = _parser(call)
        self._told = call.given_parts  # parts that the client has got from another engine

    def given(self, token_ids: Sequence[int]) -> list[AnswerPart]:
        """Take in what another engine generated; return the parts of it that the client has not got."""
        return [part for token_id in token_ids for part in self.token(Token(token_id))]

    def token(self, event: Token) -> list[AnswerPart]:
        """Count the token and return the parts that it made certain, and that were not told before."""
        self.outcome.completion_tokens += 1
        self.outcome.token_ids.append(event.token_id)
        if event.token_id in self._stops:
            self.outcome.matched_stop = event.token_id
            return []
        return self._untold(self._parse(self._stream.feed(event.token_id)))

    @property
    def stopped(self) -> bool:
        """A stop string was reached: the engine need not go on."""
        return self._stream.matched_stop is not None

    def finish(self, reason: FinishReason) -> list[AnswerPart]:
        """Return what was held back, and settle ``outcome.finish_reason``."""
        parts = self._untold(self._parse(self._stream.finish()) + self._parser.finish())
        if self.stopped:
            reason, self.outcome.matched_stop = "stop", self._stream.matched_stop
        self.outcome.finish_reason = "tool_calls" if reason == "stop" and self._parser.calls else reason
        return parts

    def _untold(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        if not self._told:
            return parts
        new = parts[self._told :]
        self._told = max(self._told - len(parts), 0)
        return new

    def _parse(self, text: str) -> list[AnswerPart]:
        return self._parser.feed(text) if text else []


def _parser(call: Call) -> AnswerParser:
    if call.tool_use == "forced":
        return ForcedCalls()
    return FreeCalls(call.tool_names) if call.tool_use == "free" else PlainText()


@dataclass(slots=True)
class _CallText:
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


def chat_answer(call: Call, parts: Sequence[AnswerPart], outcome: Outcome, *, created_s: int, model: str) -> Json:
    """Return the whole answer of a chat."""
    content = "".join(part.text for part in parts if isinstance(part, ContentText))
    calls: list[_CallText] = []
    for part in parts:
        if isinstance(part, CallStarted):
            calls.append(_CallText(part.call_id, part.name))
        elif isinstance(part, CallArguments):
            calls[part.index].arguments.append(part.text)
    message: Json = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        message["tool_calls"] = [
            {
                "id": made.call_id,
                "type": "function",
                "function": {"name": made.name, "arguments": "".join(made.arguments)},
            }
            for made in calls
        ]
    choice = {"index": 0, "message": message, "logprobs": None, **_finish(outcome)}
    return _envelope(call, "chat.completion", [choice], outcome, created_s, model)


def text_answer(call: Call, parts: Sequence[AnswerPart], outcome: Outcome, *, created_s: int, model: str) -> Json:
    """Return the whole answer of a completion."""
    text = "".join(part.text for part in parts if isinstance(part, ContentText))
    choice = {"index": 0, "text": text, "logprobs": None, **_finish(outcome)}
    return _envelope(call, "text_completion", [choice], outcome, created_s, model)


class ChunkWriter:
    """Makes the chunks of one stream, in order."""

    def __init__(self, call: Call, *, chat: bool, created_s: int, model: str) -> None:
        self._call, self._chat = call, chat
        self._head: Json = {
            "id": call.request_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created_s,
            "model": model,
        }

    def opening(self) -> list[Json]:
        """Return the chunk that names the role; a completion, and an answer that goes on, have none."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._chat and not self._call.given_ids else []

    def part(self, part: AnswerPart) -> Json:
        """Return the chunk of one part."""
        if isinstance(part, ContentText):
            return self._chunk({"content": part.text} if self._chat else part.text)
        if isinstance(part, CallStarted):
            function: Json = {"name": part.name, "arguments": ""}
            made: Json = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        else:
            made = {"index": part.index, "function": {"arguments": part.text}}
        return self._chunk({"tool_calls": [made]})

    def closing(self, outcome: Outcome) -> list[Json]:
        """Return the chunk with the finish reason, then the usage where it was asked for."""
        chunks = [self._chunk({} if self._chat else "", **_finish(outcome))]
        extension = outcome.extension(self._call)
        if self._call.include_usage or extension:
            last: Json = {**self._head, "choices": []}
            if self._call.include_usage:
                last["usage"] = outcome.usage()
            if extension:
                last["sglext"] = extension
            chunks.append(last)
        return chunks

    def _chunk(self, delta: object, *, finish_reason: str | None = None, matched_stop: object = None) -> Json:
        choice = {
            "index": 0,
            "delta" if self._chat else "text": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
            "matched_stop": matched_stop,
        }
        usage: Json = {"usage": None} if self._call.include_usage else {}
        return {**self._head, "choices": [choice], **usage}


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> Json:
    """Return an error in SGLang's shape; ``code`` is the status where there is nothing better."""
    kind = "BadRequestError" if 400 <= status < 500 else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": param, "code": code or status}


def _finish(outcome: Outcome) -> Json:
    return {"finish_reason": outcome.finish_reason, "matched_stop": outcome.matched_stop}


def _envelope(call: Call, kind: str, choices: list[Json], outcome: Outcome, created_s: int, model: str) -> Json:
    body: Json = {
        "id": call.request_id,
        "object": kind,
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": outcome.usage(),
    }
    if extension := outcome.extension(call):
        body["sglext"] = extension
    return body
