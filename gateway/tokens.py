"""Prompts as token ids, for clients: ``/tokenize``, ``/detokenize``, Anthropic's ``count_tokens`` and OpenAI's
``input_tokens``.

They are answered from the model's own tokenizer and template where this gateway has them, with what it counts prompts
by; else by an engine that has them. A prompt that cannot be translated is counted by an engine that speaks its
endpoint. Nothing is computed for them, so they leave no row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine_adapter.errors import UpstreamError
from engine_adapter.http import UpstreamClient
from engine_adapter.prompt import PromptEncoder, PromptError
from gateway.errors import BadRequest, UpstreamUnusable
from gateway.fleet import Fleet
from gateway.identity import Caller
from gateway.instance import Instance
from gateway.models import ModelDirectory
from gateway.prompts import PromptBook
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.base import Ask, Sent, model_of, objects, scan_body
from gateway.protocols.dialog import Reading
from gateway.protocols.openai_errors import engine_words
from gateway.protocols.responses.protocol import Responses
from gateway.reading import read_aside

Json = dict[str, object]

_Work = Callable[[PromptEncoder], Json]

_ANSWER_BYTES = 64 << 20
_ENGINE_S = 30.0
_COUNTS = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}


class Tokens:
    """Answers what texts and conversations are as tokens. Every method raises ``GatewayError``."""

    def __init__(
        self, models: ModelDirectory, prompts: PromptBook, fleet: Fleet, client: UpstreamClient, responses: Responses
    ) -> None:
        self._models, self._prompts, self._fleet, self._client = models, prompts, fleet, client
        self._responses = responses

    async def tokenize(self, body: bytes, caller: Caller) -> Json:
        """Return ``tokens``, ``count`` and ``max_model_len`` of a ``prompt`` or of ``messages`` (with ``tools``)."""
        asked = await read_aside(_words, body)
        model = self._models.resolve(asked.model, caller)

        def encode(encoder: PromptEncoder) -> Json:
            if asked.messages is not None:
                ids = encoder.encode_chat(asked.messages, asked.tools, add_generation_prompt=asked.has_prompt)
            elif asked.has_specials:
                ids = encoder.encode_text(asked.text)
            else:
                ids = encoder.tokenizer.encode(asked.text, add_special_tokens=False).ids
            told: Json = {"tokens": ids, "count": len(ids), "max_model_len": self._max_len(model)}
            return told | ({"token_strs": [encoder.tokenizer.id_to_token(i) for i in ids]} if asked.strings else {})

        return await self._ours(model, encode) or await self._engines(model, "/tokenize", asked.sent)

    async def detokenize(self, body: bytes, caller: Caller) -> Json:
        """Return the text of ``tokens``, under the names that SGLang and vLLM have for it."""
        asked = await read_aside(_ids, body)
        model = self._models.resolve(asked.model, caller)

        def decode(encoder: PromptEncoder) -> Json:
            if any(i >= encoder.vocab_size for i in asked.ids):
                raise PromptError(f"the model has {encoder.vocab_size} tokens", param="tokens")
            text: str = encoder.tokenizer.decode(asked.ids, skip_special_tokens=asked.skips)
            return {"text": text, "prompt": text}

        return await self._ours(model, decode) or await self._engines(model, "/detokenize", asked.sent)

    async def count_message(self, body: bytes, caller: Caller, forwarded: Mapping[str, str]) -> Json:
        """Return how many tokens a Messages request's prompt has. Nothing of it is cached by being counted.

        ``forwarded``: the request's headers that belong to the protocol.
        """
        ask = await read_aside(lambda told: MESSAGES.read(scan_body(told), needs_limit=False), body)
        return {"input_tokens": await self._count(ask, caller, forwarded)}

    async def count_response(self, body: bytes, caller: Caller, forwarded: Mapping[str, str]) -> Json:
        """Return how many tokens a Responses request's prompt has, with all that it continues and refers to."""
        sent = await read_aside(scan_body, body)
        past = await self._responses.past(sent.form, caller.identity.tenant)
        ask = await asyncio.to_thread(self._responses.read, sent, past)  # a short body may continue a long conversation
        return {"object": "response.input_tokens", "input_tokens": await self._count(ask, caller, forwarded)}

    async def _count(self, ask: Ask, caller: Caller, forwarded: Mapping[str, str]) -> int:
        model, told = self._models.resolve(ask.model, caller), None
        if ask.refusal is None:
            told = await self._ours(
                model, lambda encoder: {"count": len(encoder.encode_chat(ask.messages or (), ask.tools))}
            )
        counter = self._able(model, lambda one: one.reads(ask)) if told is None else None
        if counter is not None and ask.native is not None:
            told = await self._asked(counter, _COUNTS[ask.endpoint], ask.native, model, forwarded)
        if told is None and ask.refusal is not None:
            raise ask.refusal
        if told is None:
            question: Json = {"model": model, "messages": ask.messages, "tools": ask.tools}
            told = await self._engines(model, "/tokenize", await read_aside(scan_body, msgspec.json.encode(question)))
        if not isinstance(count := told.get("count", told.get("input_tokens")), int):
            raise UpstreamUnusable("the engine told no count")
        return count

    async def _ours(self, model: str, work: _Work) -> Json | None:
        try:
            return await self._prompts.run(model, work)
        except PromptError as error:
            raise BadRequest(str(error), param=error.param, code="invalid_prompt") from None

    async def _engines(self, model: str, path: str, sent: Sent) -> Json:
        instance = self._able(model, lambda one: one.speaks("tokenize"))
        told = None if instance is None else await self._asked(instance, path, sent, model)
        if told is None:
            raise BadRequest(
                f"there is neither a tokenizer of {model!r} here nor an engine that tells its tokens",
                param="model",
                code="endpoint_not_supported",
            )
        return told

    async def _asked(
        self, instance: Instance, path: str, sent: Sent, model: str, forwarded: Mapping[str, str] | None = None
    ) -> Json | None:
        """Return an engine's answer; ``None`` where it has no such path after all."""
        headers = {"content-type": "application/json", **(forwarded or {}), **instance.spec.headers}
        try:
            async with asyncio.timeout(_ENGINE_S):
                response = await self._client.request(
                    "POST", f"{instance.spec.url}{path}", headers, sent.edited({"model": model})
                )
                try:
                    body = await response.read_all(_ANSWER_BYTES)
                finally:
                    response.close()
        except (UpstreamError, TimeoutError) as error:
            raise UpstreamUnusable(f"the engine did not answer: {type(error).__name__}") from None
        if response.status in (404, 405):
            return None
        if response.status != 200:
            words = engine_words(response.status, body).message
            raise BadRequest(words) if 400 <= response.status < 500 else UpstreamUnusable(words)
        try:
            return msgspec.json.decode(body, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError):
            raise UpstreamUnusable("the engine's answer is no JSON object") from None

    def _able(self, model: str, is_able: Callable[[Instance], bool]) -> Instance | None:
        serving: Sequence[Instance] = self._fleet.serving(model)
        return next((i for i in serving if i.takes_requests and is_able(i)), None)

    def _max_len(self, model: str) -> int | None:
        facts = [instance.facts for instance in self._fleet.serving(model)]
        return min((f.max_model_len for f in facts if f is not None and f.max_model_len is not None), default=None)


@dataclass(frozen=True, slots=True)
class _Words:
    """What is to be made tokens: ``text``, unless there are ``messages``."""

    sent: Sent
    model: str
    text: str
    messages: Sequence[Mapping[str, object]] | None
    tools: Sequence[Mapping[str, object]]
    has_specials: bool
    has_prompt: bool
    strings: bool


def _words(body: bytes) -> _Words:
    sent = scan_body(body)
    values = sent.form.values
    prompt, messages = values.get("prompt"), objects(values.get("messages"))
    if ("prompt" in values) == ("messages" in values) or not (isinstance(prompt, str) or messages):
        raise BadRequest("send either a prompt (a string) or messages, at least one", param="prompt")
    asked = Reading(values)
    return _Words(
        sent,
        model_of(values),
        prompt if isinstance(prompt, str) else "",
        messages,
        [tool.values for tool in asked.objects("tools")],
        has_specials=asked.flag("add_special_tokens") is not False,
        has_prompt=asked.flag("add_generation_prompt") is not False,
        strings=asked.flag("return_token_strs") is True,
    )


@dataclass(frozen=True, slots=True)
class _Ids:
    """What is to be made text."""

    sent: Sent
    model: str
    ids: Sequence[int]
    skips: bool


def _ids(body: bytes) -> _Ids:
    sent = scan_body(body)
    values = sent.form.values
    told = values.get("tokens")
    if not isinstance(told, list) or not all(type(i) is int or (type(i) is float and i == i // 1) for i in told):
        raise BadRequest("'tokens' must be a list of token ids", param="tokens")
    ids = [int(i) for i in told]
    if not all(0 <= i < 1 << 31 for i in ids):
        raise BadRequest("a token id must be at least 0 and below 2^31", param="tokens")
    return _Ids(sent, model_of(values), ids, Reading(values).flag("skip_special_tokens") is True)
