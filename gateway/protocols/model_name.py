"""The model's name in an engine's own answer, where the client knows it by another: that changes and nothing else."""

from __future__ import annotations

from gateway.protocols.form import Raw, scan, scan_text
from gateway.protocols.sse import with_data


def renamed(body: bytes, model: str) -> bytes:
    """Return a whole answer, a JSON object that has a ``model``, under this name. O(body)."""
    return scan(body).edited({"model": model}).encode()


def renamed_in(event: bytes, data: bytes, member: str, model: str) -> bytes:
    """Return a stream's event whose ``data`` holds an answer in ``member``, that answer under this name. O(event)."""
    outer = scan_text(data.decode())
    inner = outer.nested(member)
    if inner is None:
        return event
    return with_data(event, outer.edited({member: Raw(inner.edited({"model": model}))}).encode())
