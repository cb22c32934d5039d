"""What holds for every test.

Generated examples are the same on every run; `./test --hypothesis-profile=explore` draws afresh, and more where a test
names no number. What it finds becomes an `@example` or a test of its own, so that no change is refused for what an
earlier one broke. Tests marked `both_loops` run on asyncio's own event loop and on the one that the gateway uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import settings

if TYPE_CHECKING:
    from tests.samples.postgres import Server

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A real PostgreSQL, started once a run and only when a test asks for it."""
    from tests.samples.postgres import running  # the extra 'postgres'

    with running() as server:
        yield server


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loops on which a test runs, by name."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("both_loops") is not None:
        loops["uvloop"] = uvloop.new_event_loop
    return loops
