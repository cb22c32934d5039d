"""What of a conversation may be written down or sent on, and what is left of words where only some may. Pure.

Redaction is a safety net for excerpts of some hundred characters, not a proof that nothing personal is left.
"""

from __future__ import annotations

import re
from enum import StrEnum
from hashlib import blake2b
from typing import Final


class ContentPolicy(StrEnum):
    """What of a conversation may be written down or exported."""

    OFF = "off"  # nothing of it
    HASHED = "hashed"  # digests, places, lengths
    REDACTED = "redacted"  # words, without what looks like a secret or a person
    FULL = "full"

    @property
    def shows_words(self) -> bool:
        """Whether words may be kept."""
        return self in (ContentPolicy.REDACTED, ContentPolicy.FULL)


MAX_CONTENT_CHARS: Final = 4096

_PATTERNS: Final = (
    ("key", re.compile(r"\b(?:sk|pk|rk|ghp|gho|ghs|glpat|xox[abprs]|AKIA|AIza|hf|kw)[-_]?[A-Za-z0-9_\-]{12,}")),
    ("token", re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*")),
    ("secret", re.compile(r"(?i)\b(?:bearer|passw(?:or)?d|secret|api[_-]?key|token)\b[\"']?\s*[:= ]\s*[^\s,;]{4,}")),
    ("email", re.compile(r"[A-Za-z0-9._%+\-]+@[A-Za-z0-9.\-]+\.[A-Za-z]{2,}")),
    ("iban", re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}\b")),
    ("card", re.compile(r"\b(?:\d[ -]?){13,19}\b")),
    ("phone", re.compile(r"(?<![\w:.-])\+\d[\d ()/-]{7,16}\d\b")),
)

_CONTENT: Final = re.compile(
    r"gen_ai\.(input\.messages|output\.messages|system_instructions|prompt|completion|tool\.call\.(arguments|result)"
    r"|tool\.definitions|retrieval\.(documents|query\.text))(\.|$)"
    r"|(input|output)\.value$|llm\.(input_messages|output_messages|prompts|completions|prompt_template|tools)(\.|$)"
    r"|tool\.(parameters|description)$|tool_call\.function\.arguments|retrieval\.documents"
    r"|traceloop\.entity\.(input|output)$"
)
"""Span attributes that hold what was said, in the conventions of OpenTelemetry, OpenInference and OpenLLMetry."""


def redacted(text: str) -> str:
    """Return the text with each piece that looks like a secret or a person replaced by what kind of thing it was."""
    for name, pattern in _PATTERNS:
        text = pattern.sub(f"[{name}]", text)
    return text


def is_content(attribute: str) -> bool:
    """Tell whether a span's attribute holds what was said."""
    return _CONTENT.search(attribute) is not None


def said_attributes(asked: str, answered: str, policy: ContentPolicy) -> dict[str, str]:
    """Return the span attributes of what was asked and answered, in both conventions' names, as far as policy goes.

    Digests have names of our own: a backend would take them for words.
    """
    found: dict[str, str] = {}
    for text, side in ((asked, "input"), (answered, "output")):
        is_digest = policy is ContentPolicy.HASHED
        names = (f"keepwarm.{side}.digest",) if is_digest else (f"gen_ai.{side}.messages", f"{side}.value")
        value = content_value(text, policy) if text else None
        if value is not None:
            found |= dict.fromkeys(names, value.encode("utf-8", "replace").decode("utf-8"))
    return found


def content_value(text: str, policy: ContentPolicy) -> str | None:
    """Return what may be kept of a text, bounded; ``None``: nothing."""
    match policy:
        case ContentPolicy.OFF:
            return None
        case ContentPolicy.HASHED:
            digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
            return f"{digest} ({len(text)} characters)"
        case ContentPolicy.REDACTED:
            return redacted(text[:MAX_CONTENT_CHARS])
        case ContentPolicy.FULL:
            return text[:MAX_CONTENT_CHARS]
