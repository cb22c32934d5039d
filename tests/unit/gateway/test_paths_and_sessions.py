"""Where endpoints are, and what headers say of a session."""

from __future__ import annotations

import pytest

from gateway.paths import split, tidied
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


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/models", "/v1/models"),
        ("//v1//models/", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/c/a/v1/v1/messages/", "/c/a/v1/messages"),
        ("//host/x", "/host/x"),
        ("v1/models", "/v1/models"),
        ("/", "/"),
        ("//", "/"),
        ("", "/"),
        ("/openai/deployments/m/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/c/a/openai/models", "/c/a/v1/models"),
        ("/c/a/v1/deployments/m/embeddings", "/c/a/v1/embeddings"),
    ],
)
def test_a_path_that_was_joined_carelessly_is_the_one_that_was_meant(path: str, meant: str) -> None:
    assert tidied(path) == meant
    assert tidied(meant) == meant


def test_sessions_that_agents_name() -> None:
    claude = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert session_of({}) is None
    assert session_of({"x-session-id": "s"}) == session_of({"x-session-id": "s", "x-other": "1"}) is not None
    assert session_of({"x-session-id": "caption-ses_a1B"}) == session_of(
        {"x-session-id": "ses_a1B"}
    )  # a call beside it
    assert session_of({"x-session-id": "team-a1"}) != session_of({"x-session-id": "a1"})
    names = [
        session_of(h) for h in (claude, {"x-claude-code-session-id": "s"}, {"session-id": "s"}, {"x-session-id": "s"})
    ]
    assert len({name.key for name in names if name is not None}) == 4
    for odd in ("", "x" * (MAX_CHARS + 1), "a\nb", "\udcff"):
        assert session_of({"x-session-id": odd}) is None


def test_sessions_in_bodies_and_the_agents_above() -> None:
    user = '{"device_id": "d", "account_uuid": "", "session_id": "s"}'
    header = session_of({"x-claude-code-session-id": "s"})
    assert header is not None
    assert session_of({}, {"metadata": {"user_id": user}}) == header
    old = session_of({}, {"metadata": {"user_id": "user_ab_account__session_0f8fad5b-d9cb-469f-a165-70867728950e"}})
    assert old is not None
    assert old.name == "0f8fad5b-d9cb-469f-a165-70867728950e"
    child = session_of({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"})
    assert child is not None
    assert (child.name, child.parent) == ("s", header.key)
    code = session_of({"x-session-id": "c", "x-parent-session-id": "p"})
    parent = session_of({"x-session-id": "p"})
    assert code is not None
    assert parent is not None
    assert (code.parent, parent.parent) == (parent.key, None)
    assert session_of({}, {"conversation": {"id": "conv_1"}}) == session_of({}, {"conversation": "conv_1"})
    for odd in (
        {"metadata": {"user_id": "jo"}},
        {"metadata": 3},
        {"conversation": 3},
        {"metadata": {"user_id": "session {"}},
        {"metadata": {"user_id": "[" * 1010 + "session"}},
        {},
    ):
        assert session_of({}, odd) is None
