"""What holds for every test: generated examples are the same on every run, unless one asks for new ones.

`./test --hypothesis-profile=explore` draws afresh and tries five times as many. What it finds becomes an `@example`
or a test of its own, so that a change is never refused for what an earlier one broke.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.samples.postgres import Server, running

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A real PostgreSQL, started once a run and only when a test asks for it."""
    with running() as server:
        yield server
