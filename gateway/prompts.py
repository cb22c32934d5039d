"""Prompts as token ids and block hashes, made beside the event loop, never on it when they are long.

Each model has at most one encoder. Where a prompt's ids cannot be known (no readable tokenizer, media in it, a template
of the client's own, counts that its engines contradict, too long to be worth it) its text is hashed in chunks instead,
and the prompt says that it is not exact. Prompts that come as token ids need no encoder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from engine_adapter.prompt import EncodedPrompt, PromptEncoder, PromptError, PromptOptions, TemplateError, Wire
from gateway.agreement import Agreement, AgreementState
from gateway.protocols.base import Ask
from gateway.text_chunks import BYTES_PER_TOKEN, chunk_hashes, conversation_bytes
from kvstore.block import routing_hash_array, routing_seed

_log = logging.getLogger(__name__)

INLINE_BYTES = 4096
"""Bodies up to this size are encoded at once: handing them to a thread would cost more."""


LONG_BYTES = 1 << 20
"""Longer bodies have a thread of their own: nobody else's prompt waits behind one."""

MAX_EXACT_BYTES = 4 << 20
"""Longer bodies are not tokenized: few models read a million tokens, and an engine will refuse them sooner."""

WIRE_BYTES = 1 << 15
"""From this length on, a conversation that grows is recognized by the text in which it was sent."""

MAX_WAITING_BYTES = 64 << 20
"""While bodies of this length wait for a thread, further ones are routed by load alone."""

_Made = TypeVar("_Made")
_FOREIGN_OPTIONS = ("chat_template", "documents")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's length in tokens, and its routing hashes for each block size that was asked for."""

    tokens: int
    hashes: Mapping[int, Sequence[int]]
    is_exact: bool = True
    """The hashes are of the token ids that an engine will see; else of the text, which tells where it was before."""
    is_counted: bool = True
    """``tokens`` is a count; else an estimate, good for weighing load only."""
    is_comparable: bool = True
    """An engine that uses the same template and tokenizer counts the same, whatever the prompt says."""


class PromptBook:
    """The encoders of all models, the few threads that run them, and whether engines agree with them."""

    def __init__(self, threads: int = 2, agreement: Agreement | None = None) -> None:
        self._encoders: dict[str, PromptEncoder] = {}
        self._failed: set[tuple[str, Path]] = set()
        self._agreement = agreement or Agreement()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keepwarm-prompts")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-long-prompts")
        self._waiting_bytes = 0

    def knows(self, model: str) -> bool:
        """Tell whether prompts of the model can be encoded."""
        return model in self._encoders

    async def load(self, model: str, folder: Path, template: str | None) -> bool:
        """Read the model's tokenizer and template, once; ``False``, logged once, where that cannot be done."""
        if model in self._encoders:
            return True
        if (model, folder) in self._failed:
            return False
        loop = asyncio.get_running_loop()
        try:
            encoder = await loop.run_in_executor(self._pool, lambda: PromptEncoder.load(folder, template=template))
        except (OSError, ValueError, TemplateError) as error:
            return self._fail(model, folder, error)
        except Exception as error:  # the tokenizers library raises bare Exception for a file that it can't read
            if type(error) is not Exception:
                raise
            return self._fail(model, folder, error)
        self._encoders[model] = encoder
        self._agreement.forget(model)
        _log.info(
            "prompts of %s are encoded by the tokenizer in %s (template %s)", model, folder, encoder.template_name
        )
        return True

    def _fail(self, model: str, folder: Path, error: Exception) -> bool:
        self._failed.add((model, folder))
        _log.warning("no tokenizer for %s in %s (%s): its requests are routed by their text", model, folder, error)
        return False

    async def encode(
        self, model: str, ask: Ask, salt: str | None, block_sizes: Iterable[int], body: bytes
    ) -> Prompt | None:
        """Return the prompt as the engine will see it, or as near as can be known; ``None`` where that is nothing.

        ``body`` is what ``ask`` was read from.
        """
        body_bytes = len(body)
        job = _Job(
            encoder=self._encoders.get(model) if body_bytes <= MAX_EXACT_BYTES else None,
            ask=ask,
            body=body,
            model=model,
            salt=salt,
            block_sizes=tuple(set(block_sizes)),
            is_trusted=self._agreement.is_trusted(model),
        )
        if body_bytes <= INLINE_BYTES:
            return job.run()
        if self._waiting_bytes and self._waiting_bytes + body_bytes > MAX_WAITING_BYTES:
            return None
        self._waiting_bytes += body_bytes
        try:
            pool = self._pool if body_bytes <= LONG_BYTES else self._long_pool
            return await asyncio.get_running_loop().run_in_executor(pool, job.run)
        finally:
            self._waiting_bytes -= body_bytes

    async def run(self, model: str, work: Callable[[PromptEncoder], _Made]) -> _Made | None:
        """Do something with the model's encoder, in a thread; ``None`` where there is none."""
        encoder = self._encoders.get(model)
        if encoder is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._long_pool, work, encoder)

    def answered(self, model: str, *, agrees: bool) -> None:
        """Take in how an engine counted a comparable prompt. Logs when that changes the verdict on the model."""
        if not self._agreement.answered(model, agrees=agrees):
            return
        state = self._agreement.state(model)
        if state.is_trusted:
            _log.info("%s: engines count prompts as we do again; routing by token ids", model)
        else:
            _log.error(
                "%s: engines counted %d of the last %d prompts otherwise: its template or tokenizer is not theirs. "
                "Its requests are routed by text until they agree",
                model, state.disagreements, state.answers,
            )  # fmt: skip

    def agreement(self, model: str) -> AgreementState:
        """Return how a model's engines agreed lately."""
        return self._agreement.state(model)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._long_pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt to be made; any thread may run it."""

    encoder: PromptEncoder | None
    ask: Ask
    body: bytes
    model: str
    salt: str | None
    block_sizes: Sequence[int]
    is_trusted: bool

    def run(self) -> Prompt | None:
        """Return the prompt: exact, or by its text, or ``None``."""
        try:
            exact = self._exact()
        except (PromptError, UnicodeEncodeError, OverflowError):
            exact = None  # an odd role, media, a lone surrogate, an id out of range: the engine will say what is wrong
        if exact is not None and self.is_trusted:
            return exact
        by_text = self._by_text()
        if exact is None or by_text is None:
            return by_text
        return replace(exact, hashes=by_text.hashes, is_exact=False)  # counted still, to find out when they agree again

    def _exact(self) -> Prompt | None:
        ask, seed = self.ask, routing_seed(self.model, None, self.salt)
        if ask.messages is None and ask.prompt is not None and not isinstance(ask.prompt, str):
            return self._of_ids(ask.prompt, seed)
        if self.encoder is None:
            return None
        if ask.messages is None:
            return self._of_ids(self.encoder.encode_text(ask.prompt), seed) if isinstance(ask.prompt, str) else None
        options = _options(ask.form.values)
        if options is None:
            return None
        encoded: EncodedPrompt = self.encoder.encode_chat_hashed(
            ask.messages,
            ask.tools,
            seed=seed,
            block_sizes=self.block_sizes,
            options=options,
            wire=wire_of(ask, self.body),
        )
        return Prompt(
            len(encoded),
            cast("Mapping[int, Sequence[int]]", encoded.hashes),
            is_comparable=not (encoded.has_markers or options.continue_final_message),
        )

    def _of_ids(self, token_ids: Sequence[int], seed: int) -> Prompt:
        hashes = {size: routing_hash_array(token_ids, size, seed) for size in self.block_sizes}
        return Prompt(len(token_ids), cast("Mapping[int, Sequence[int]]", hashes))

    def _by_text(self) -> Prompt | None:
        ask = self.ask
        if ask.messages is None and ask.prompt is None:
            return None
        data = conversation_bytes(ask.messages, ask.tools, ask.prompt)
        if data is None:
            return None
        hashes = chunk_hashes(data, self.block_sizes, self.model, self.salt)
        tokens = len(data) // BYTES_PER_TOKEN
        return Prompt(tokens, hashes, is_exact=False, is_counted=False, is_comparable=False)


def wire_of(ask: Ask, body: bytes) -> Wire | None:
    """Return where a long body holds the messages; short ones are serialized sooner than looked at."""
    member = next((member for member in reversed(ask.form.members) if member.name == "messages"), None)
    if len(body) < WIRE_BYTES or member is None:
        return None
    text = ask.form.text
    if text.isascii():
        return Wire(body, member.start, member.end)
    return Wire(body, len(text[: member.start].encode()), len(body) - len(text[member.end :].encode()))


def _options(values: Mapping[str, object]) -> PromptOptions | None:
    """Return how the client wants its chat rendered; ``None`` where only the engine can know what comes of it."""
    variables, continues = values.get("chat_template_kwargs"), values.get("continue_final_message")
    if any(values.get(name) is not None for name in _FOREIGN_OPTIONS):
        return None
    if not (variables is None or isinstance(variables, dict)):
        return None
    return PromptOptions(
        add_generation_prompt=values.get("add_generation_prompt") is not False,
        continue_final_message=continues is True,
        variables=variables,
    )
