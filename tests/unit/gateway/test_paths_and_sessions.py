"""Where endpoints are, and what headers say of a session."""

from __future__ import annotations

import pytest

from gateway.paths import split
from gateway.sessions import MAX_CHARS, session_of


@pytest.mark.parametrize(
    ("target", "label", "path"),
    [
        ("/v1/messages", None, "/messages"),
        ("/messages?beta=true", None, "/messages"),
        ("/c/a%20b/v1/messages?x", "a b", "/messages"),
        ("/c/a/messages", "a", "/messages"),
        ("/c/a", "a", ""),
        ("/c//v1/messages", None, "/messages"),
        ("/v1", None, "/v1"),
        ("/", None, "/"),
        ("/v1x/messages", None, "/v1x/messages"),
        ("/c/a/c/b/messages", "a", "/c/b/messages"),
    ],
)
def test_a_target_is_a_label_and_a_path(target: str, label: str | None, path: str) -> None:
    assert split(target) == (label, path)


def test_sessions_that_agents_name() -> None:
    claude = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert session_of({}) is None
    assert session_of({"x-session-id": "s"}) == session_of({"x-session-id": "s", "x-other": "1"}) is not None
    names = [
        session_of(h) for h in (claude, {"x-claude-code-session-id": "s"}, {"session-id": "s"}, {"x-session-id": "s"})
    ]
    assert len({name.key for name in names if name is not None}) == 4
    for odd in ("", "x" * (MAX_CHARS + 1), "a\nb", "\udcff"):
        assert session_of({"x-session-id": odd}) is None
