"""What was found, as lines and as JSON; anything that differs makes the run fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Checks:
    """Collects figures and failures."""

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    passed: int = 0

    def equal(self, what: str, found: object, wanted: object) -> None:
        """Note whether these are equal."""
        self.true(what, found == wanted, f"found {found!r}, wanted {wanted!r}")

    def true(self, what: str, holds: bool, detail: str = "") -> None:
        """Note whether it holds."""
        if holds:
            self.passed += 1
            print(f"  ok    {what}", flush=True)
        else:
            self.failures.append(f"{what}: {detail}")
            print(f"  FAILS {what}: {detail}", flush=True)

    def note(self, name: str, value: object) -> None:
        """Keep a figure."""
        self.figures[name] = value
        print(f"        {name}: {value}", flush=True)
