"""Price structures as plain data, written out as a book on the one hand and calculated with by hand on the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, ROUND_UP, Decimal, localcontext

MODES = {"half_even": ROUND_HALF_EVEN, "half_up": ROUND_HALF_UP, "up": ROUND_UP, "down": ROUND_DOWN}
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Rates = Mapping[str, str]


@dataclass(frozen=True)
class Hours:
    """A window: local hours of some weekdays, at a fixed offset from UTC, not on holidays."""

    factor: str
    hours: tuple[tuple[int, int], ...]
    weekdays: tuple[str, ...] = WEEKDAYS
    zone: str = "UTC"
    offset_hours: int = 0
    holidays: tuple[date, ...] = ()
    workdays: tuple[date, ...] = ()

    def covers(self, at: datetime) -> bool:
        """Look at a clock on a wall there."""
        local = at + timedelta(hours=self.offset_hours)
        if local.date() in self.holidays:
            return False
        if WEEKDAYS[local.weekday()] not in self.weekdays and local.date() not in self.workdays:
            return False
        return any(start <= local.hour < end for start, end in self.hours)


@dataclass(frozen=True)
class Structure:
    """One price. ``hit`` stands for hit classes that are not named."""

    name: str
    rates: Rates
    above: tuple[int, Rates] | None = None
    windows: tuple[Hours, ...] = ()
    tiers: Mapping[str, str] = field(default_factory=dict)
    fee: str = "0"
    minimum: str = "0"
    tools: Rates = field(default_factory=dict)
    mode: str = "half_even"
    level: str = "line"

    def toml(self, model: str) -> str:
        """Write it as a book."""
        lines = [
            f'name = "{self.name}"', 'currency = "USD"',
            f'rounding = {{ mode = "{self.mode}", level = "{self.level}" }}',
            *(f"holidays.h{n} = [{', '.join(map(str, w.holidays))}]" for n, w in enumerate(self.windows)),
            "[[price]]", f'models = ["{model}"]', f'request_fee = "{self.fee}"', f'request_minimum = "{self.minimum}"',
            f"tool_fees = {{ {', '.join(f'{tool} = {fee}' for tool, fee in self.tools.items())} }}",
            "[price.rates]", *(f'{name} = "{rate}"' for name, rate in self.rates.items()),
        ]  # fmt: skip
        for number, window in enumerate(self.windows):
            hours = ", ".join(f'["{start:02d}:00", "{end:02d}:00"]' for start, end in window.hours)
            days = ", ".join(f'"{day}"' for day in window.weekdays)
            lines += ["[[price.windows]]", f'name = "w{number}"', f'timezone = "{window.zone}"', f"hours = [{hours}]"]
            lines += [f"weekdays = [{days}]", f'except_holidays = ["h{number}"]', f'multiplier = "{window.factor}"']
            lines += [f"also_on = [{', '.join(map(str, window.workdays))}]"]
        if self.above is not None:
            rates = ", ".join(f'{name} = "{rate}"' for name, rate in self.above[1].items())
            lines += ["[[price.context]]", f"above_prompt_tokens = {self.above[0]}", f"rates = {{ {rates} }}"]
        lines += ["[price.service_tiers]"] if self.tiers else []
        lines += [f'{name} = {{ multiplier = "{factor}" }}' for name, factor in self.tiers.items()]
        return "\n".join(lines)

    def cost_nano(
        self, counts: Mapping[str, int], at_ns: int, tier: str | None = None, uses: Mapping[str, int] = {}
    ) -> int | None:
        """Calculate by hand: decimals, a wall clock, a rule of three.

        ``uses``: of tools. ``None``: a class or a tool is used that has no price.
        """
        if any(count and tool not in self.tools for tool, count in uses.items()):
            return None
        at = datetime.fromtimestamp(at_ns // 10**9, UTC)
        prompt = sum(count for name, count in counts.items() if name not in ("output", "reasoning"))
        rates = self.rates if self.above is None or prompt <= self.above[0] else self.above[1]
        factor = next((Decimal(window.factor) for window in self.windows if window.covers(at)), Decimal(1))
        factor *= Decimal(self.tiers[tier]) if tier is not None else 1
        with localcontext() as context:
            context.prec = 60
            parts = []
            for name, count in counts.items():
                rate = rates.get(name, rates.get("hit") if name.startswith("hit_") else None)
                if not count:
                    continue
                if rate is None:
                    return None
                parts.append(count * Decimal(rate) * factor * 1000)
            if self.level == "line":
                used = sum((self._whole(part) for part in parts), Decimal(0))
            else:
                used = self._whole(sum(parts, Decimal(0)))
            used += Decimal(self.fee).scaleb(9)
            used += sum(
                (count * Decimal(self.tools[tool]).scaleb(9) for tool, count in uses.items() if count), Decimal(0)
            )
            return int(max(used, Decimal(self.minimum).scaleb(9)))

    def _whole(self, nano: Decimal) -> Decimal:
        return nano.quantize(Decimal(1), rounding=MODES[self.mode])


_CN = (date(2026, 10, 1), date(2026, 10, 2), date(2026, 10, 5))
_MAKE_UP = (date(2026, 10, 10),)  # a Saturday that is worked
_WORKDAYS = WEEKDAYS[:5]

STRUCTURES = (
    Structure(
        "flat",
        {"fresh": "1.25", "hit": "0.125", "write": "1.25", "write_5m": "1.5", "write_1h": "2.5", "output": "10"},
    ),
    Structure(
        "deepseek", {"fresh": "0.15", "hit": "0.003", "output": "0.60"},
        windows=(Hours("2", ((1, 4), (6, 10)), _WORKDAYS, holidays=_CN),),
    ),
    Structure(
        "openai", {"fresh": "0.20", "hit": "0.02", "write": "0.25", "output": "1.20"},
        above=(272_000, {"fresh": "0.40", "hit": "0.04", "write": "0.50", "output": "1.80"}),
        tiers={"batch": "0.5", "flex": "0.5", "priority": "2"},
    ),
    Structure(
        "anthropic", {"fresh": "5", "hit": "0.25", "write_5m": "6.25", "write_1h": "10", "output": "25"},
        above=(200_000, {"fresh": "10", "hit": "0.50", "write_5m": "12.5", "write_1h": "20", "output": "37.5"}),
        tiers={"batch": "0.5"},
    ),
    Structure(
        "gemini", {"fresh": "2", "hit": "0.20", "output": "12"},
        above=(200_000, {"fresh": "4", "hit": "0.40", "output": "18"}), tiers={"batch": "0.5", "priority": "1.75"},
    ),
    Structure(
        "qwen", {"fresh": "0.8", "hit": "0.16", "write": "1.0", "write_5m": "1.0", "output": "2.0"},
        above=(128_000, {"fresh": "1.2", "hit": "0.24", "write": "1.5", "write_5m": "1.5", "output": "3"}),
        tiers={"batch": "0.5"},
    ),
    Structure("moonshot", {"fresh": "1", "hit": "0.10", "write": "1", "write_5m": "1", "write_1h": "2", "output": "4"}),
    Structure(
        "self-hosted",
        {
            "fresh": "0.115741", "hit_device": "0.000001", "hit_host": "0.007717", "hit_disk": "0.07", "hit": "0.1",
            "output": "0.5",
        },
        fee="0.000001", minimum="0.0005",
    ),
    Structure(
        "tiny", {"fresh": "0.000123456789", "hit": "0.000000000001", "output": "0.0005", "reasoning": "0.0007"},
        mode="half_up", level="request",
    ),
    Structure("up", {"fresh": "0.0333", "hit": "0.0111", "output": "0.0777"}, mode="up", fee="0.000000001"),
    Structure("down", {"fresh": "0.0333", "hit": "0.0111", "output": "0.0777"}, mode="down", level="request"),
    Structure(
        "shanghai", {"fresh": "3", "hit": "0.3", "write": "3", "write_5m": "3", "write_1h": "6", "output": "9"},
        windows=(
            Hours("1.5", ((9, 12), (14, 18)), _WORKDAYS, "Asia/Shanghai", 8, _CN, _MAKE_UP),
            Hours("0.25", ((0, 8),), WEEKDAYS, "Asia/Shanghai", 8),
        ),
        tiers={"batch": "0.5"},
    ),
)  # fmt: skip


def with_rounding(structure: Structure, mode: str, level: str) -> Structure:
    """The same with another rounding rule."""
    return replace(structure, mode=mode, level=level)
