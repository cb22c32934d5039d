"""What a replay raises.

```
ReplayError
├── TraceError         the trace can't be read; names the file and the line
└── ParameterError     the stated fleet or load makes no sense
```
"""

from __future__ import annotations


class ReplayError(Exception):
    """The root of this package's errors."""


class TraceError(ReplayError):
    """A trace is not in any known format, or a line of it is wrong."""

    def __init__(self, source: str, line: int | None, problem: str) -> None:
        super().__init__(f"{source}: {problem}" if line is None else f"{source}, line {line}: {problem}")
        self.source, self.line, self.problem = source, line, problem


class ParameterError(ReplayError):
    """A parameter of the simulated fleet or of its load is impossible."""
