"""The console's own files, packaged, each addressed by its content so that browsers may keep it for ever."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Final

_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: its bytes, its type, and a short digest of the bytes."""

    body: bytes
    content_type: str
    digest: str


@cache
def assets() -> dict[str, Asset]:
    """All files by name."""
    found: dict[str, Asset] = {}
    for entry in files("gateway.console").joinpath("static").iterdir():
        suffix = entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            body = entry.read_bytes()
            found[entry.name] = Asset(body, _TYPES[suffix], blake2b(body, digest_size=6).hexdigest())
    return found


def asset_href(name: str) -> str:
    """The address of a file in this build."""
    return f"/console/static/{name}?v={assets()[name].digest}"
