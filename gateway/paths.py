"""Where things are: each endpoint with and without ``/v1``, and both behind an optional ``/c/<label>``.

An agent that can set nothing but a URL names its runs by the label.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

ROOTS = ("/v1", "", "/c/{label}/v1", "/c/{label}")
"""In aiohttp's spelling."""

_SLASHES = re.compile(r"//+")
_AZURE = re.compile(r"^(/c/[^/]+)?/(?:openai(?:/deployments/[^/]+)?|v1/deployments/[^/]+)(?=/)")


def tidied(path: str) -> str:
    """Return where a path leads that is none of ours: ``//v1/models/`` and ``/v1/v1/models``, which a base URL makes
    that has a slash or a version too many, to ``/v1/models``, and as clients of Azure's OpenAI write it,
    ``/openai/deployments/m/chat/completions``, to ``/v1/chat/completions`` (``m`` is in the body, too).

    It begins with one slash, so that it never names a host.
    """
    path = _SLASHES.sub("/", f"/{path}").rstrip("/") or "/"
    return _AZURE.sub(r"\1/v1", path).replace("/v1/v1/", "/v1/", 1)


def split(target: str) -> tuple[str | None, str]:
    """Return a request target's label and its path without label, ``/v1`` and query: ``/c/x/v1/messages?a`` gives
    ``x`` and ``/messages``."""
    path, label = target.partition("?")[0], None
    if path.startswith("/c/"):
        label, mark, rest = path[3:].partition("/")
        path = mark + rest
    path = path.removeprefix("/v1") if path.startswith("/v1/") else path
    return (unquote(label) if label else None), path
