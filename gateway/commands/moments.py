"""Moments as people write them on a command line, and as they are printed."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from billing.errors import ReportError

_AGO = re.compile(r"(\d{1,12})([mhd])")
_FIRST_NS, _LAST_NS = -(2**63), 2**63 - 1  # beyond these nothing is recorded: 1677, 2262
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}


def parse_moment(text: str, now_ns: int) -> int:
    """Return the instant in ns of an ISO date or time (UTC unless it says otherwise), or of ``24h`` before now.

    Raises ``ReportError``.
    """
    if ago := _AGO.fullmatch(text):
        return max(now_ns - int(ago[1]) * _UNIT_S[ago[2]] * 10**9, _FIRST_NS)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ReportError(f"{text!r} is no time: write 2026-11-01, 2026-11-01T08:00Z, 30m, 24h or 7d") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    ns = (since.days * 86400 + since.seconds) * 10**9 + since.microseconds * 1000
    return min(max(ns, _FIRST_NS), _LAST_NS)


def utc_text(ns: int) -> str:
    """Return an instant as people write it, to the second, in UTC."""
    return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
