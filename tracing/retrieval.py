"""Which tools look something up, as far as their names tell. Pure."""

from __future__ import annotations

import re
from typing import Final

RETRIEVAL_TOOL: Final = re.compile(
    r"(?i)search|retriev|look_?up|query|fetch_doc|knowledge|vector|rag(?![a-z])|grep|find_"
)
"""Names of tools that look something up; a span of the agent's own says it better."""


def is_retrieval(tool_name: str) -> bool:
    """Tell whether a tool's name says that it looks something up."""
    return RETRIEVAL_TOOL.search(tool_name) is not None
