"""What digests alone tell of two steps, where the former one's text is not at hand: which section changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.diagnosis.sections import SYSTEM, Kept, digest, digest_of, is_system
from tracing.detail import BreakKind, PromptChange, Reproduction


def change_by_digests(before: Reproduction, after: Reproduction, total_chars: int) -> PromptChange | None:
    """Return the first section that differs, with no place within it; ``None`` where digests tell of none.

    Messages are not told of: that there are more of them is the rule.
    """
    for section, old, new, kind in (
        ("model", before.model, after.model, BreakKind.MODEL_CHANGED),
        ("tools", before.tools_digest, after.tools_digest, BreakKind.TOOLS_CHANGED),
        ("system", before.system_digest, after.system_digest, BreakKind.SYSTEM_EDITED),
    ):
        if old != new:
            total = max(total_chars, 1)
            return PromptChange(kind, section, section, 0, 0, 0, 0, old or "", new or "", 0, total, total)
    return None


def system_digest(kept: Kept, values: Mapping[str, object]) -> str | None:
    """Return a digest of what the system is told, as a member or as the conversation's first message."""
    if (own := digest_of(kept, SYSTEM)) is not None:
        return own
    messages = values.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    return digest(str(first.get("content"))) if isinstance(first, Mapping) and is_system(first) else None
