"""Hours, and calendar windows: when a price's peak or off-peak hours are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from zoneinfo import ZoneInfo

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_SECONDS = 24 * 3600
HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class CalendarWindow:
    """Hours of chosen weekdays in one time zone, but not on holidays. Hours are [start, end) in seconds of the day.

    ``workdays`` count whatever their weekday; a date that is a holiday as well does not.
    """

    zone: ZoneInfo
    weekdays: frozenset[int]  # 0 = Monday
    hours: tuple[tuple[int, int], ...]
    holidays: frozenset[date] = frozenset()
    workdays: frozenset[date] = frozenset()

    def covers(self, at_ns: int) -> bool:
        """Tell whether the instant (ns since the epoch) lies in the window, by the wall clock of its zone."""
        local = datetime.fromtimestamp(at_ns // 1_000_000_000, self.zone)
        day = local.date()
        if (local.weekday() not in self.weekdays and day not in self.workdays) or day in self.holidays:
            return False
        second = local.hour * 3600 + local.minute * 60 + local.second
        return any(start <= second < end for start, end in self.hours)


def parse_hour(text: str) -> int:
    """Return the second of the day of ``HH:MM``; ``24:00`` is its end. Raises ``ValueError``."""
    hours, colon, minutes = text.partition(":")
    if not colon or len(hours) != 2 or len(minutes) != 2 or not (hours + minutes).isdecimal():
        raise ValueError(f"{text!r} is no time of day (HH:MM)")
    second = int(hours) * 3600 + int(minutes) * 60
    if int(minutes) > 59 or second > DAY_SECONDS:
        raise ValueError(f"{text!r} is no time of day (00:00 to 24:00)")
    return second
