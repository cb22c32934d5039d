"""The sessions that agents name in headers of their own: evidence of the run that a request belongs to.

Seen from real clients: Claude Code names its session, and beside it each sub-agent, which is a run of its own; Codex a
session and a thread; opencode a session for each agent; OpenHands one for LiteLLM's sake. Everybody else sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_SESSIONS = (
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("session-id", "thread-id"),
    ("x-session-id", None),
    ("x-litellm-session-id", None),
)
"""The header of the session, and the one that tells agents within it apart."""

MAX_CHARS = 128


def session_of(headers: Mapping[str, str]) -> str | None:
    """Return the session that the request says it belongs to; anything that is no plain id counts as none."""
    for name, within in _SESSIONS:
        values = [headers.get(name) or "", (headers.get(within) or "") if within is not None else ""]
        if values[0] and all(len(value) <= MAX_CHARS and value.isprintable() for value in values):
            return "\n".join([name, *values])
    return None
