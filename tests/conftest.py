"""What holds for every test: generated examples are the same on every run, unless one asks for new ones.

`./test --hypothesis-profile=explore` draws afresh and tries five times as many. What it finds becomes an `@example`
or a test of its own, so that a change is never refused for what an earlier one broke.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("repeatable")
