"""Numbers as people read them: exact money, counts, durations, shares. Shared by the console and the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

NOTHING: Final = "–"
_SYMBOLS: Final = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "CNY": "CN¥"}
_NANO: Final = 10**9
_LEAD_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class Amount:
    """An exact amount in two parts: what the eye needs (``lead``) and the digits that make it exact (``rest``)."""

    lead: str
    rest: str
    is_zero: bool = False

    def __str__(self) -> str:
        return self.lead + self.rest


def money(nano: int, currency: str) -> Amount:
    """All nine decimals of an amount of nano-units: ``money(1_234_567, "USD")`` is $0.0012 + 34567."""
    whole, fraction = divmod(abs(nano), _NANO)
    digits = f"{fraction:09d}"
    sign = "−" if nano < 0 else ""
    unit = _SYMBOLS.get(currency, f"{currency} ")
    return Amount(f"{sign}{unit}{whole:,}.{digits[:_LEAD_DIGITS]}", digits[_LEAD_DIGITS:], nano == 0)


def count(number: int) -> str:
    """A count with its thousands apart."""
    return f"{number:,}"


def share(part: int, whole: int) -> str:
    """A share in percent, cut and never rounded up: 100% means all of it and 0% nothing."""
    if whole <= 0:
        return NOTHING
    tenths = part * 1000 // whole
    if part and not tenths:
        return "<0.1%"
    with_tenths = 0 < tenths < 100 or 990 <= tenths < 1000
    return f"{tenths // 10}.{tenths % 10}%" if with_tenths else f"{tenths // 10}%"


def duration(ns: int | None) -> str:
    """Three significant digits with the unit that fits, minutes and hours in two parts."""
    if ns is None:
        return NOTHING
    if ns < 0:
        return "−" + duration(-ns)
    if ns < 999_500:
        return f"{ns / 1e3:.0f} µs"
    if ns < 10**9 - 500_000:
        return f"{ns / 1e6:.3g} ms"
    if ns < 60 * 10**9 - 50_000_000:
        return f"{ns / 1e9:.3g} s" if ns < 10**10 else f"{ns / 1e9:.1f} s"
    seconds = round(ns / 1e9)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds // 60 % 60:02d} min"


def moment(ns: int) -> str:
    """A time of day in UTC to the second."""
    return datetime.fromtimestamp(ns // _NANO, UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso_moment(ns: int) -> str:
    """The machine-readable form of :func:`moment`."""
    return datetime.fromtimestamp(ns // _NANO, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ago(ns: int, now_ns: int) -> str:
    """How long ago, in one unit."""
    seconds = max(0, now_ns - ns) // _NANO
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit != "d" and seconds >= size):
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def of(noun: str, shown: object) -> str:
    """Put a noun whose plural ends in an s behind its number as it is shown: ``1 step``, ``1,000 steps``."""
    return f"{shown} {noun}" if str(shown) == "1" else f"{shown} {noun}s"
