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
from pathlib import Path
from typing import TypeVar

import msgspec

from engine_adapter.answers import AnswerMemo
from engine_adapter.conversations import Anchors
from engine_adapter.prompt import PromptEncoder, PromptError, TemplateError
from gateway.agreement import Agreement, AgreementState
from gateway.prompt_job import Prompt, PromptJob, Quotations
from gateway.prompt_rules import PromptRules
from gateway.protocols.base import Ask
from tracing.messages import MessageChain

__all__ = ["Prompt", "PromptBook"]

_log = logging.getLogger(__name__)

INLINE_BYTES = 4096
"""So much new text, or less, is encoded at once: handing it to a thread would cost more."""


LONG_BYTES = 1 << 20
"""Longer bodies have a thread of their own: nobody else's prompt waits behind one."""

MAX_EXACT_BYTES = 4 << 20
"""Longer bodies are not tokenized: few models read a million tokens, and an engine will refuse them sooner."""

MAX_WAITING_BYTES = 64 << 20
"""While bodies of this length wait for a thread, further ones are routed by load alone."""

_Made = TypeVar("_Made")


class PromptBook:
    """The encoders of all models, the few threads that run them, and whether engines agree with them."""

    def __init__(self, threads: int = 2, agreement: Agreement | None = None) -> None:
        self._encoders: dict[str, PromptEncoder] = {}
        self._failed: set[tuple[str, Path]] = set()
        self._agreement = agreement or Agreement()
        self._answers = AnswerMemo()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keepwarm-prompts")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-long-prompts")
        self._waiting_bytes = 0

    def knows(self, model: str) -> bool:
        """Tell whether prompts of the model can be encoded."""
        return model in self._encoders

    def template_of(self, model: str) -> str | None:
        """Return what the model's prompts are rendered with: the template's name and a digest of it."""
        encoder = self._encoders.get(model)
        return None if encoder is None else encoder.template_id

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
        self,
        model: str,
        ask: Ask,
        salt: str | None,
        block_sizes: Iterable[int],
        body: bytes,
        *,
        cached_as: tuple[str, str | None] | None = None,
        rules: PromptRules | None = None,
        key_id: str | None = None,
        chain: MessageChain = (),
        anchors: Anchors | None = None,
        new_bytes: int | None = None,
    ) -> Prompt | None:
        """Return the prompt as the engine will see it, or as near as can be known; ``None`` where that is nothing.

        ``body`` is what ``ask`` was read from, ``new_bytes`` of it behind what was known, ``anchors`` what was left
        at its messages' ends, ``chain`` what they are known by; of a ``key_id`` whose answers
        ``rules`` let us keep, those that the messages quote get their own ids. ``cached_as``: the model and the adapter
        whose blocks the prompt's are; ``None``: the model itself. Raises ``BadRequest`` for ids that are
        no tokens of the model, and for what the model's policy refuses.
        """
        body_bytes, encoder = len(body), self._encoders.get(model)
        if new_bytes is not None and anchors is not None and encoder is not None and encoder.goes_on(anchors):
            body_bytes = new_bytes
        rules = rules or PromptRules(tools=ask.tools)
        job = PromptJob(
            encoder=encoder,
            ask=ask,
            body=body,
            cached_as=_with_adapter(cached_as or (model, None), ask),
            salt=salt,
            block_sizes=tuple(set(block_sizes)),
            rules=rules,
            quotations=self._quotations(model, ask, salt, rules, key_id, chain),
            max_exact_bytes=MAX_EXACT_BYTES,
            is_trusted=self._agreement.is_trusted(model),
            is_verified=self._agreement.is_verified(model),
            anchors=anchors,
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

    def _quotations(
        self, model: str, ask: Ask, salt: str | None, rules: PromptRules, key_id: str | None, chain: MessageChain
    ) -> Quotations | None:
        messages = ask.messages
        if key_id is None or not rules.keeps_answers or messages is None or not messages or len(chain) != len(messages):
            return None
        owner = msgspec.msgpack.encode([key_id, model, salt])
        return Quotations(self._answers, owner, chain)

    def remember(
        self, prompt: Prompt, message: Mapping[str, object], output_ids: Sequence[int], counted_tokens: object
    ) -> None:
        """Keep the ids of an answer, for requests that quote it. Call it before the client sees the answer's end.

        ``counted_tokens``: the prompt's, as the engine told. An engine that saw another prompt generated another
        answer.
        """
        if prompt.answerable is None or counted_tokens != prompt.tokens:
            return
        answer = prompt.answerable.answer(message, output_ids)
        if answer is not None:
            self._answers.remember(prompt.answerable.name, answer)

    def tokens_of(self, model: str, text: str) -> int:
        """Return how many tokens a text has in the model's eyes, 0 where that is not known; a long one's in proportion
        to its beginning's: it is counted at once."""
        encoder, beginning = self._encoders.get(model), text[:INLINE_BYTES]
        if encoder is None or not beginning:
            return 0
        try:
            return encoder.count(beginning) * len(text) // len(beginning)
        except PromptError:
            return 0

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


def _with_adapter(cached_as: tuple[str, str | None], ask: Ask) -> tuple[str, str | None]:
    """Heed the adapter that a request names itself (SGLang's ``lora_path``)."""
    named = ask.form.values.get("lora_path")
    return (cached_as[0], named) if isinstance(named, str) and named else cached_as
