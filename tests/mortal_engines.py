"""Embedded engines as processes that a test may kill, stop and start again; small ones where the model says nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.embedded.launch import EmbeddedProcess, LaunchSpec, free_port
from tests.embedded_engines import READY_LIMIT_S, healthy
from tests.samples.engines import make_tiny_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def small_model(folder: Path) -> Path:
    """Write a random model of some hundred thousand parameters with the default model's tokenizer; return ``folder``.

    What it says is noise, with pieces of characters in it and any token, special ones included.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder, vocab_size=49_152, max_position_embeddings=4096, initializer_range=0.05)
    source = ensure_default_model()
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    return folder


class MortalEngine:
    """One engine's process. Killed, it stays dead until ``revive``."""

    def __init__(self, name: str, folder: Path, arguments: Sequence[str]) -> None:
        spec = LaunchSpec(name, free_port(), folder / f"{name}.log", tuple(arguments), {"OMP_NUM_THREADS": "1"})
        self._life: asyncio.Task[None] | None = None
        self._spec, self._process = spec, EmbeddedProcess(spec)
        self.url = spec.url

    @property
    def pid(self) -> int:
        """Its process, while it lives."""
        assert self._process.pid is not None
        return self._process.pid

    async def live(self) -> None:
        """Start, and be healthy."""
        self._process = EmbeddedProcess(self._spec)
        self._life = asyncio.create_task(self._process.run(lambda: True))
        async with aiohttp.ClientSession() as session, asyncio.timeout(READY_LIMIT_S):
            while not await healthy(session, self.url):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """End it without a word."""
        life, self._life = self._life, None
        assert life is not None
        life.cancel()  # nobody starts it again
        self.send(signal.SIGKILL)
        await asyncio.wait({life})

    async def end(self) -> None:
        """End it as one does."""
        if self._life is not None:
            await self._process.stop()
            await asyncio.wait({self._life})
            self._life = None


@asynccontextmanager
async def mortal_engines(folder: Path, count: int, arguments: Sequence[str]) -> AsyncIterator[list[MortalEngine]]:
    """Run so many engines with these arguments, all healthy."""
    engines = [MortalEngine(f"mortal-{number}", folder, arguments) for number in range(count)]
    try:
        await asyncio.gather(*(engine.live() for engine in engines))
        yield engines
    finally:
        await asyncio.gather(*(engine.end() for engine in engines))
