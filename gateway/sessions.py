"""The sessions that agents name, in headers or in the body: evidence of the run that a request belongs to.

Seen from real clients: Claude Code names its session, and beside it each sub-agent, which is a run of its own, and says
both in ``metadata.user_id`` again, where proxies leave it; Codex a session and a thread; opencode a session for each
agent, and the one that it works for; Kilo Code, made from it, one more for a title, which names the agent's; OpenHands
one for LiteLLM's sake. Most others send nothing, unless an application sets a header or a metadata member that is meant
for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_CHARS: Final = 128

_CLAUDE: Final = "x-claude-code-session-id"
_HEADERS: Final = (
    (_CLAUDE, "x-claude-code-agent-id", "x-claude-code-parent-agent-id", None),
    ("session-id", "thread-id", "x-codex-parent-thread-id", None),
    ("x-session-id", None, None, "x-parent-session-id"),
    ("x-litellm-session-id", None, None, None),
    ("x-conversation-id", None, None, None),
    ("helicone-session-id", None, None, None),
)
"""The header of the session; the one that tells agents within it apart, and the one that names the agent above; the
header of the session above."""

_NAMES: Final = frozenset(header for header, *_ in _HEADERS)
_METADATA: Final = ("session_id", "conversation_id", "thread_id", "litellm_session_id")
_CLAUDE_USER: Final = re.compile(r"^user_.+_session_([0-9a-f-]{36})$")


@dataclass(frozen=True, slots=True)
class Session:
    """A session: by what it is known, what the client calls it, and by what the one is known that it works for."""

    key: str
    name: str
    parent: str | None = None


_ASIDE: Final = re.compile(r"[a-z]+-(ses_[0-9A-Za-z]+)")
"""What a call beside an agent's own is named, its title's for instance: by a word before the agent's session."""


def session_of(headers: Mapping[str, str], values: Mapping[str, object] | None = None) -> Session | None:
    """Return the session that a request says it belongs to; anything that is no plain id counts as none.

    ``values``: the body's members.
    """
    if isinstance(headers, dict) and _NAMES.isdisjoint(headers):  # most requests, at the price of one look
        return None if values is None else _in_body(values)
    for header, within, above, parent in _HEADERS:
        if (session := headers.get(header)) and _is_plain(session):
            agent = (headers.get(within) or "") if within is not None else ""
            if not _is_plain(agent):
                return None
            session = aside[1] if (aside := _ASIDE.fullmatch(session)) is not None else session
            return Session(
                f"{header}\n{session}\n{agent}",
                session,
                _parent(headers, header, session, agent, above, parent),
            )
    return None if values is None else _in_body(values)


def _parent(
    headers: Mapping[str, str], header: str, session: str, agent: str, above: str | None, parent: str | None
) -> str | None:
    if parent is not None and (over := headers.get(parent)) and _is_plain(over) and over != session:
        return f"{header}\n{over}\n"
    if above is None or not agent:
        return None
    over = headers.get(above) or ""
    if header == _CLAUDE:
        return f"{header}\n{session}\n{over}" if _is_plain(over) else None
    return f"{header}\n{session}\n{over}" if over and over != agent and _is_plain(over) else None


def _in_body(values: Mapping[str, object]) -> Session | None:
    if "conversation" not in values and "metadata" not in values:
        return None
    conversation = values.get("conversation")
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
    if isinstance(conversation, str) and conversation and _is_plain(conversation):
        return Session(f"conversation\n{conversation}\n", conversation)
    metadata = values.get("metadata")
    if not isinstance(metadata, Mapping):
        return None
    if (claude := _claude_session(metadata.get("user_id"))) is not None:
        return Session(f"{_CLAUDE}\n{claude}\n", claude)
    for name in _METADATA:
        value = metadata.get(name)
        if isinstance(value, str) and value and _is_plain(value):
            return Session(f"metadata.{name}\n{value}\n", value)
    return None


def _claude_session(user_id: object) -> str | None:
    """Return the session within Claude Code's ``metadata.user_id``: JSON, or a name with the session at its end."""
    if not isinstance(user_id, str) or "session" not in user_id or len(user_id) > 8 * MAX_CHARS:
        return None
    if (match := _CLAUDE_USER.match(user_id)) is not None:
        return match[1]
    try:
        told = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    session = told.get("session_id") if isinstance(told, dict) else None
    return session if isinstance(session, str) and session and _is_plain(session) else None


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_CHARS and text.isprintable()
