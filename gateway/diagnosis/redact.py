"""Words without what looks like a secret or names a person: what the content policy *redacted* lets through. Pure.

This is a safety net for excerpts of some hundred characters, not a proof that nothing personal is left.
"""

from __future__ import annotations

import re
from typing import Final

_PATTERNS: Final = (
    ("key", re.compile(r"\b(?:sk|pk|rk|ghp|gho|ghs|glpat|xox[abprs]|AKIA|AIza|hf|kw)[-_]?[A-Za-z0-9_\-]{12,}")),
    ("token", re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*")),
    (
        "secret",
        re.compile(r"(?i)\b(?:bearer|password|passwd|secret|api[_-]?key|token)\b[\"']?\s*[:= ]\s*[\"']?[^\s\"',;]{4,}"),
    ),
    ("email", re.compile(r"[A-Za-z0-9._%+\-]+@[A-Za-z0-9.\-]+\.[A-Za-z]{2,}")),
    ("iban", re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}\b")),
    ("card", re.compile(r"\b(?:\d[ -]?){13,19}\b")),
    ("phone", re.compile(r"(?<![\w:.-])\+\d[\d ()/-]{7,16}\d\b")),
)


def redacted(text: str) -> str:
    """Return the text with each such piece replaced by what kind of thing it was."""
    for name, pattern in _PATTERNS:
        text = pattern.sub(f"[{name}]", text)
    return text
