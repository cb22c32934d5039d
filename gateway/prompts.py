"""Prompts as token ids and block hashes, made beside the event loop, never on it when they are long.

Each model has at most one encoder. A model without one (no readable tokenizer) is still served: its requests are routed
by load alone, and their records say so. Prompts that come as token ids need none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.prompt import PromptEncoder, PromptError, TemplateError
from gateway.protocols.openai import Ask
from kvstore.block import routing_hashes, routing_seed

_log = logging.getLogger(__name__)

INLINE_BYTES = 4096
"""Bodies up to this size are encoded at once: handing them to a thread would cost more."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's length in tokens, and its routing hashes for each block size that was asked for."""

    tokens: int
    hashes: Mapping[int, Sequence[int]]


class PromptBook:
    """The encoders of all models, and the few threads that run them."""

    def __init__(self, threads: int = 2) -> None:
        self._encoders: dict[str, PromptEncoder] = {}
        self._failed: set[tuple[str, Path]] = set()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keepwarm-prompts")

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
        _log.info(
            "prompts of %s are encoded by the tokenizer in %s (template %s)", model, folder, encoder.template_name
        )
        return True

    def _fail(self, model: str, folder: Path, error: Exception) -> bool:
        self._failed.add((model, folder))
        _log.warning("no tokenizer for %s in %s (%s): its requests are routed by load alone", model, folder, error)
        return False

    async def encode(
        self, model: str, ask: Ask, salt: str | None, block_sizes: Iterable[int], body_bytes: int
    ) -> Prompt | None:
        """Return the prompt as the engine will see it, ``None`` where it cannot be known."""
        encoder = self._encoders.get(model)
        if not _is_encodable(ask, encoder):
            return None
        sizes, seed = tuple(set(block_sizes)), routing_seed(model, None, salt)
        if body_bytes <= INLINE_BYTES:
            return _encode(encoder, ask, seed, sizes)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _encode, encoder, ask, seed, sizes)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_encodable(ask: Ask, encoder: PromptEncoder | None) -> bool:
    """Tell whether the prompt's ids can be had: they were sent, or there is an encoder for what was."""
    if ask.messages is None and (ask.prompt is None or not isinstance(ask.prompt, str)):
        return ask.prompt is not None
    return encoder is not None


def _encode(encoder: PromptEncoder | None, ask: Ask, seed: int, sizes: Sequence[int]) -> Prompt | None:
    try:
        token_ids = _token_ids(encoder, ask)
        return Prompt(len(token_ids), {size: routing_hashes(token_ids, size, seed) for size in sizes})
    except (PromptError, UnicodeEncodeError, OverflowError):
        return None  # an odd role, a lone surrogate, an id out of range: the engine will say what is wrong


def _token_ids(encoder: PromptEncoder | None, ask: Ask) -> Sequence[int]:
    if ask.messages is None and ask.prompt is not None and not isinstance(ask.prompt, str):
        return ask.prompt
    assert encoder is not None
    if ask.messages is not None:
        return encoder.encode_chat(ask.messages, ask.tools)
    assert isinstance(ask.prompt, str)
    return encoder.encode_text(ask.prompt)
