"""What a price comes down to once model, date, calendar, context length and service tier are known: integers.

A rate is an integer number of pico-units (10⁻¹²) of the book's currency per million tokens. So 0.003 per million is
``3_000_000_000``, a price may have twelve decimals, and ``tokens * rate / 10**9`` is exact in nano-units (10⁻⁹).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

#: The closed set of rates. Usage has one field for each but ``reasoning``, which lies inside its output.
TOKEN_CLASSES = (
    "fresh",
    "hit_device",
    "hit_host",
    "hit_disk",
    "hit_pool",
    "hit_unknown",
    "write",
    "write_5m",
    "write_1h",
    "output",
    "reasoning",
)

#: The closed set of tools that APIs run themselves and charge for by use.
TOOLS = ("web_search", "web_fetch", "file_search", "code_execution")

#: Decimals of a price per million tokens that a rate can hold.
PRICE_DECIMALS = 12
#: ``tokens * rate`` divided by this is nano-units.
RATE_PER_NANO = 10**9


class RoundingMode(StrEnum):
    """Where an amount between two nano-units goes."""

    HALF_EVEN = "half_even"
    HALF_UP = "half_up"
    UP = "up"
    DOWN = "down"


class RoundingLevel(StrEnum):
    """What is rounded: every line of a request, or its sum (the lines then share the sum by largest remainder)."""

    LINE = "line"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class Rounding:
    """How exact amounts become whole nano-units."""

    mode: RoundingMode = RoundingMode.HALF_EVEN
    level: RoundingLevel = RoundingLevel.LINE

    def divide(self, numerator: int, denominator: int) -> int:
        """Divide by a positive number. ``half_up`` and ``up`` go away from zero, ``down`` goes toward it."""
        quotient, rest = divmod(abs(numerator), denominator)
        match self.mode:
            case RoundingMode.HALF_EVEN:
                up = 2 * rest > denominator or (2 * rest == denominator and quotient % 2 == 1)
            case RoundingMode.HALF_UP:
                up = 2 * rest >= denominator
            case RoundingMode.UP:
                up = rest > 0
            case RoundingMode.DOWN:
                up = False
        quotient += up
        return quotient if numerator >= 0 else -quotient


@dataclass(frozen=True, slots=True)
class RateCard:
    """The rates of one price in one context tier, calendar window and service tier."""

    rule: str  # which price that is, in words: it goes into the bill
    rates: Mapping[str, int]  # token class -> pico-units per million tokens
    request_fee_nano: int = 0
    request_minimum_nano: int = 0
    storage_pico: int | None = None  # for keeping a million tokens cached for an hour
    tool_fees_nano: Mapping[str, int] = field(default_factory=dict)  # tool -> for one use

    def fee_nano(self, line: str) -> int | None:
        """Return what one of a line costs that counts no tokens: ``request`` or a tool; ``None`` for others."""
        return self.request_fee_nano if line == "request" else self.tool_fees_nano.get(line)


@dataclass(frozen=True, slots=True)
class NoPrice:
    """There is no price, and why: ``no_price``, ``not_in_force`` or ``no_service_tier``."""

    reason: str
