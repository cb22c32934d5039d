"""Moments, spans and amounts as people and JSON write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation

from gateway.access.errors import AccessRefused
from gateway.access.records import LimitKind, Period

_SPAN = re.compile(r"(?P<count>[0-9]{1,9})(?P<unit>s|m|h|d|w)?", re.ASCII)
_LATEST_NS = 4_102_444_800 * 10**9
"""2100: what is said to be later is taken to be then, and what is said to be before 1970 to be then."""

_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def span_s(text: str) -> int:
    """Return the seconds of ``90``, ``15m``, ``24h``, ``30d``, ``2w``. Raises ``AccessRefused``."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise AccessRefused(f"{text!r} is no span of time: write 90s, 15m, 24h, 30d or 2w")
    return int(found["count"]) * _SECONDS[found["unit"]]


def moment_ns(text: str, now_ns: int) -> int:
    """Return the instant of ``2027-01-31``, ``2027-01-31T12:00:00Z``, or a span from now. Raises ``AccessRefused``."""
    if _SPAN.fullmatch(text):
        return min(now_ns + span_s(text) * 10**9, _LATEST_NS)
    try:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return min(max(int(moment.timestamp()) * 10**9, 0), _LATEST_NS)
    except (ValueError, OverflowError):
        raise AccessRefused(f"{text!r} is no moment: write 2027-01-31, 2027-01-31T12:00:00Z, or 90d") from None


def moment_text(at_ns: int | None) -> str | None:
    """Return an instant in UTC."""
    if at_ns is None:
        return None
    return datetime.fromtimestamp(at_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def money_limit(text: str) -> tuple[int, Period]:
    """Return nano-units and window of ``25.50/day``; a number alone is for a month. Raises ``AccessRefused``."""
    number, _, window = text.partition("/")
    try:
        nano = Decimal(number).scaleb(9)
        period = Period(window or "month")
        if nano != nano.to_integral_value() or nano < 0:
            raise ValueError
    except (ValueError, InvalidOperation):
        raise AccessRefused(f"{text!r} is no amount in a window: write 100, 25.50/day or 500/month") from None
    return int(nano), period


def amount_text(kind: LimitKind, amount: int) -> str:
    """Return a limit's amount; money in units of the currency."""
    if kind is not LimitKind.MONEY:
        return str(amount)
    return f"{amount // 10**9}.{amount % 10**9:09}".rstrip("0").rstrip(".")
