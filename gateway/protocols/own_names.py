"""Errors about a translated request, in the words of who sent it.

Engines get a chat completion, and name its members in what they refuse. A client of another protocol sent no such
member: it is told its own one. What lies within it (``messages[3].content``) is left out, since the client's own has
other places.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

from gateway.errors import GatewayError
from gateway.protocols.openai_errors import engine_words, error_kind

Names = Mapping[str, str]
"""A chat completion's members, and what a protocol calls what became them."""

_SHARED = ("messages", "tools", "tool_choice")
_WITHIN = r"(?:\[\d+\]|\.\w+)"


def engine_error(status: int, body: bytes, names: Names) -> bytes:
    """Return an engine's error, in OpenAI's shape, with the client's own names."""
    words = engine_words(status, body)
    told = {
        "message": own_words(words.message, names),
        "type": words.kind or error_kind(status),
        "param": own_member(words.param, names) if isinstance(words.param, str) else words.param,
        "code": words.code,
    }
    return json.dumps({"error": told}).encode()


def named_by(error: GatewayError, names: Names) -> GatewayError:
    """Let an error of the gateway's own name the client's member. What names one of no chat's stays as it is."""
    if error.param is not None and re.split(r"[\[.]", error.param)[0] in names:
        error.param = own_member(error.param, names)
    return error


def own_member(param: str, names: Names) -> str:
    """Return what the client calls the member that a path of a chat completion begins with."""
    member = re.split(r"[\[.]", param.removeprefix("body."))[0]
    return names.get(member, member)


def own_words(text: str, names: Names) -> str:
    """Return an engine's sentence with the client's names in it. Words that are no names for certain stay."""
    shared = tuple(name for name in _SHARED if name not in names)
    return _pattern((*names, *shared)).sub(lambda found: names.get(name := _member(found), name), text)


def _member(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group is not None)


@lru_cache
def _pattern(members: tuple[str, ...]) -> re.Pattern[str]:
    """Match members as paths into them, in quotes, as what a sentence is about, or where no English word looks so."""
    any_of, snakes = "|".join(members), "|".join(name for name in members if "_" in name)
    return re.compile(
        rf"\b(?:body\.)?({any_of}){_WITHIN}+|(?<=['\"`])({any_of})(?=['\"`])"
        rf"|(?:^|(?<=; ))({any_of})(?=: )|\b({snakes})\b"
    )
