"""What the tests of one gateway before one scripted engine share: the engine runs as long as a module's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.scripted_engine import ScriptedEngine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_engine() -> AsyncIterator[ScriptedEngine]:
    """An engine for all tests of a module."""
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def engine(running_engine: ScriptedEngine) -> ScriptedEngine:
    """The engine, as if nobody had asked it anything yet."""
    running_engine.forget()
    return running_engine
