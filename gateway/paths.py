"""Where things are: each endpoint with and without ``/v1``, and both behind an optional ``/c/<label>``.

An agent that can set nothing but a URL names its runs by the label.
"""

from __future__ import annotations

from urllib.parse import unquote

ROOTS = ("/v1", "", "/c/{label}/v1", "/c/{label}")
"""In aiohttp's spelling."""


def split(target: str) -> tuple[str | None, str]:
    """Return a request target's label and its path without label, ``/v1`` and query: ``/c/x/v1/messages?a`` gives
    ``x`` and ``/messages``."""
    path, label = target.partition("?")[0], None
    if path.startswith("/c/"):
        label, mark, rest = path[3:].partition("/")
        path = mark + rest
    path = path.removeprefix("/v1") if path.startswith("/v1/") else path
    return (unquote(label) if label else None), path
