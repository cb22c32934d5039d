"""From a call to the parts of its answer: prompt, grammar, engine, text. No HTTP here.

Encoding and compiling run on threads of their own; the engine tells its events from its thread and they are taken over
by the event loop. A ``Generation`` that is left early, for whatever reason, is aborted in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic_ns

from engine_adapter.embedded.answers import AnswerFold, Outcome
from engine_adapter.embedded.chat import Call, Json
from engine_adapter.embedded.constraint import GrammarCompiler
from engine_adapter.embedded.detokenize import TokenBytes
from engine_adapter.embedded.engine import Engine
from engine_adapter.embedded.errors import EngineError, RequestError
from engine_adapter.embedded.metrics import EngineMetrics
from engine_adapter.embedded.request import (
    Admitted,
    GenerationEvent,
    GenerationRequest,
    SamplingParams,
    Token,
)
from engine_adapter.embedded.toolcalls import AnswerPart
from engine_adapter.prompt import PromptEncoder


class GenerationError(EngineError):
    """The engine gave up on this request for a reason that is not the client's."""


class Generation:
    """One answer on its way. Iterate ``parts`` to the end, then read ``outcome``."""

    def __init__(self, call: Call, fold: AnswerFold, engine: Engine, metrics: EngineMetrics) -> None:
        self.call = call
        self._fold, self._engine, self._metrics = fold, engine, metrics
        self._events: asyncio.Queue[GenerationEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._arrived_ns = monotonic_ns()

    @property
    def outcome(self) -> Outcome:
        """The counts so far; complete when ``parts`` has ended."""
        return self._fold.outcome

    def deliver(self, event: GenerationEvent) -> None:
        """Take an event over from the engine's thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def parts(self) -> AsyncIterator[list[AnswerPart]]:
        """Yield what each step of the engine made certain, possibly nothing. Raises ``GenerationError``, and
        ``RequestError`` for a grammar that cannot be gone on with.

        The first list comes with the first token, whatever text that makes.
        """
        previous_ns: int | None = None
        left = self._fold.given(self.call.given_ids)  # told with the first list, so that a failure until then is one
        was_stopped = self._fold.stopped
        if was_stopped:
            yield left + self._fold.finish("stop")
            return
        while True:
            event = await self._events.get()
            if isinstance(event, Admitted):
                self.outcome.admitted(event.hit_tokens)
            elif isinstance(event, Token):
                now_ns = monotonic_ns()
                self._metrics.token(now_ns - (previous_ns or self._arrived_ns), first=previous_ns is None)
                previous_ns = now_ns
                yield left + self._fold.token(event)
                left = []
                if self._fold.stopped:
                    self._engine.abort(self.call.request_id)
                    yield self._fold.finish("stop")
                    break
            else:
                if event.asked_for:
                    raise RequestError(event.error or "the output could not be constrained", code="invalid_schema")
                if event.reason == "error":
                    raise GenerationError(event.error or "the engine gave up on this request")
                yield left + self._fold.finish(event.reason)
                break
        self._metrics.finished(self.outcome, monotonic_ns() - self._arrived_ns)


class EngineService:
    """Everything that a request needs, in one place. Use from one event loop."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        compiler: GrammarCompiler,
        metrics: EngineMetrics,
    ) -> None:
        self.engine, self.encoder, self.metrics = engine, encoder, metrics
        self._compiler = compiler
        self._token_bytes = TokenBytes(encoder.tokenizer)
        longest = max((len(self._token_bytes[i]) for i in range(encoder.vocab_size)), default=1)
        self._most_chars = engine.max_model_len * max(longest, 1)
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encode")

    @asynccontextmanager
    async def generate(self, call: Call) -> AsyncIterator[Generation]:
        """Submit the call; leaving the block ends it in the engine. Raises ``RequestError`` and ``PromptError``."""
        token_ids = call.token_ids
        if token_ids is None:
            token_ids = tuple(await self.encode(call.text if call.text is not None else call.messages, call.tools))
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        constraint = await self._compiler.compile_soon(call.grammar) if call.grammar is not None else None
        stops = self.encoder.stop_token_ids | call.stop_token_ids
        generation = Generation(
            call, AnswerFold(call, self._token_bytes, len(token_ids), stops), self.engine, self.metrics
        )
        room = self.engine.max_model_len - len(token_ids)
        request = GenerationRequest(
            request_id=call.request_id,
            token_ids=token_ids,
            sampling=SamplingParams(
                max_tokens=call.max_tokens if call.max_tokens is not None else max(1, room),
                temperature=call.temperature,
                top_p=call.top_p,
                seed=call.seed,
                stop_token_ids=stops,
            ),
            salt=call.salt,
            constraint=constraint,
            priority=call.priority,
            session=call.session,
            given_ids=call.given_ids,
        )
        self.engine.submit(request, generation.deliver)
        try:
            yield generation
        finally:
            self.engine.abort(call.request_id)

    async def encode(self, prompt: str | Sequence[Json], tools: Sequence[Json] | None = None) -> list[int]:
        """Return a prompt's ids. Raises ``PromptError`` and ``RequestError``. Never blocks the event loop.

        A text that cannot fit, whatever its tokens are, is refused unread: others wait for the thread that reads it.
        """
        loop = asyncio.get_running_loop()
        is_text = isinstance(prompt, str)
        chars = text_chars(prompt if is_text else [prompt, tools])
        if chars > self._most_chars:
            limit = self.engine.max_model_len
            raise RequestError(
                f"{chars} characters are more than {limit} tokens can hold",
                param="prompt" if is_text else "messages",
                code="context_length_exceeded",
            )
        try:
            if isinstance(prompt, str):
                return await loop.run_in_executor(self._encoding, self.encoder.encode_text, prompt)
            return await loop.run_in_executor(self._encoding, self.encoder.encode_chat, prompt, tools)
        except RecursionError:
            raise RequestError("the messages are nested too deeply", param="messages") from None

    async def warm_up(self, call: Call) -> None:
        """Answer ``call`` once, and make the grammar compiler's vocabulary: what would slow the first request down.

        The prompt should be shorter than a page, so that nothing is published for it.
        """
        vocabulary = asyncio.get_running_loop().run_in_executor(self._encoding, self._compiler.vocabulary)
        async with self.generate(replace(call, max_tokens=2)) as generation:
            async for _ in generation.parts():
                pass
        await vocabulary

    def close(self) -> None:
        """Stop the threads of encoding and compiling. Idempotent."""
        self._encoding.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()


def text_chars(value: object) -> int:
    """Return how many characters the strings in decoded JSON have, names of members included. O(values)."""
    chars, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, Mapping):
            chars += sum(map(len, item))
            left.extend(item.values())
        elif isinstance(item, Sequence):
            left.extend(item)
    return chars
