"""The price book as it is written: a strict TOML file. ``billing.prices`` turns it into rates.

Prices are decimal numbers per million tokens (``0.003`` or ``"0.003"``; TOML numbers are read as decimals, never as
floats). A key that is not known, a price with more than twelve decimals or a negative one is an error that names its
path. The README of this package shows every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

from billing.calendar import WEEKDAYS, CalendarWindow, parse_hour
from billing.rates import PRICE_DECIMALS, RoundingLevel, RoundingMode


def _no_float(value: object) -> object:
    if isinstance(value, float | bool):
        raise ValueError("must be a decimal number, not a float or a boolean")
    return value


def _exact(value: Decimal) -> Decimal:
    """Refuse what integers can't hold, and give equal numbers one spelling."""
    exponent = value.normalize().as_tuple().exponent
    if not isinstance(exponent, int) or exponent < -PRICE_DECIMALS:
        raise ValueError(f"has more than {PRICE_DECIMALS} decimals")
    return Decimal(f"{value.normalize():f}")


def _instant(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("must have a time zone, as in 2026-08-16T00:00:00Z")
    return value


Price = Annotated[Decimal, BeforeValidator(_no_float), Field(ge=0, le=10**6), AfterValidator(_exact)]
Factor = Annotated[Decimal, BeforeValidator(_no_float), Field(ge=0, le=1000), AfterValidator(_exact)]
Instant = Annotated[datetime, AfterValidator(_instant)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
TokenClass = Literal[
    "fresh", "hit_device", "hit_host", "hit_disk", "hit_pool", "hit_unknown",
    "write", "write_5m", "write_1h", "output", "reasoning",
]  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClassTable(_Strict):
    """One number per token class. ``hit`` stands for every hit class that is not named itself."""

    fresh: Price | None = None
    hit: Price | None = None
    hit_device: Price | None = None
    hit_host: Price | None = None
    hit_disk: Price | None = None
    hit_pool: Price | None = None
    hit_unknown: Price | None = None
    write: Price | None = None
    write_5m: Price | None = None
    write_1h: Price | None = None
    output: Price | None = None
    reasoning: Price | None = None

    def by_class(self) -> dict[str, Decimal]:
        """Return the numbers of the classes that have one, ``hit`` spread over the hit classes."""
        table = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is None and name.startswith("hit_"):
                value = self.hit
            if value is not None and name != "hit":
                table[name] = value
        return table


class RateTable(ClassTable):
    """Prices per million tokens. A class without a price makes a request that uses it unpriced, never free."""

    @model_validator(mode="after")
    def _has_fresh(self) -> RateTable:
        if self.fresh is None:
            raise ValueError("fresh: every price needs one for computed prompt tokens")
        return self


class Adjustment(_Strict):
    """A change of all rates by one factor, or of some by one factor each (the others stay)."""

    multiplier: Factor | None = None
    multipliers: ClassTable | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Adjustment:
        if (self.multiplier is None) == (self.multipliers is None):
            raise ValueError("needs exactly one of multiplier and multipliers")
        return self

    def apply(self, rates: dict[str, Decimal]) -> dict[str, Decimal]:
        """Return the changed rates."""
        if self.multiplier is not None:
            return {name: rate * self.multiplier for name, rate in rates.items()}
        factors = self.multipliers.by_class() if self.multipliers else {}
        return {name: rate * factors.get(name, 1) for name, rate in rates.items()}


class ContextTier(_Strict):
    """Rates of the whole request when its prompt, hits and writes included, is longer than ``above_prompt_tokens``."""

    above_prompt_tokens: Annotated[StrictInt, Field(gt=0)]
    rates: RateTable | None = None
    multiplier: Factor | None = None
    multipliers: ClassTable | None = None

    @model_validator(mode="after")
    def _one_way(self) -> ContextTier:
        if sum(way is not None for way in (self.rates, self.multiplier, self.multipliers)) != 1:
            raise ValueError("needs exactly one of rates, multiplier and multipliers")
        return self

    def apply(self, rates: dict[str, Decimal]) -> dict[str, Decimal]:
        """Return the rates of this tier, given those of the base."""
        if self.rates is not None:
            return self.rates.by_class()
        return Adjustment(multiplier=self.multiplier, multipliers=self.multipliers).apply(rates)


class Window(Adjustment):
    """Hours with other rates: the first window that covers the request's arrival counts."""

    name: Name
    timezone: str = "UTC"
    weekdays: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] = WEEKDAYS  # type: ignore[assignment]
    hours: tuple[tuple[str, str], ...] = (("00:00", "24:00"),)
    except_on: tuple[date, ...] = ()  # holidays …
    except_holidays: tuple[Name, ...] = ()  # … and those of the book's calendars of these names
    also_on: tuple[date, ...] = ()  # dates that count whatever their weekday: working days that make up for holidays

    @model_validator(mode="after")
    def _compiles(self) -> Window:
        self.window()
        return self

    def window(self, calendars: Mapping[str, tuple[date, ...]] = {}) -> CalendarWindow:
        """Return the window as values, given the book's holidays by calendar. Raises ``ValueError``."""
        try:
            zone = ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError(f"timezone: there is none named {self.timezone!r}") from None
        hours = tuple((parse_hour(start), parse_hour(end)) for start, end in self.hours)
        if any(start >= end for start, end in hours):
            raise ValueError("hours: each must end after it starts; split one that crosses midnight in two")
        named = (day for name in self.except_holidays for day in calendars.get(name, ()))
        return CalendarWindow(
            zone,
            frozenset(map(WEEKDAYS.index, self.weekdays)),
            hours,
            frozenset((*self.except_on, *named)),
            frozenset(self.also_on),
        )


class PriceEntry(_Strict):
    """One price: which models, since when, for whom, and the rates. The first entry of the file that fits counts."""

    models: Annotated[tuple[Name, ...], Field(min_length=1)]
    effective_from: Instant | None = None
    effective_to: Instant | None = None
    teams: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    regions: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    rates: RateTable
    context: tuple[ContextTier, ...] = ()
    windows: tuple[Window, ...] = ()
    service_tiers: dict[Name, Adjustment] = {}
    request_fee: Price = Decimal(0)
    request_minimum: Price = Decimal(0)
    storage_per_hour: Price | None = None
    tool_fees: dict[Literal["web_search", "web_fetch", "file_search", "code_execution"], Price] = {}  # for each use
    cache_minimum_tokens: Annotated[StrictInt, Field(gt=0)] | None = None  # shorter prompts are never cached
    cache_lifetime_s: Annotated[StrictInt, Field(gt=0)] | None = None  # after the last use, unless written for longer

    @model_validator(mode="after")
    def _in_order(self) -> PriceEntry:
        if self.effective_from and self.effective_to and self.effective_from >= self.effective_to:
            raise ValueError("effective_to: must lie after effective_from")
        limits = [tier.above_prompt_tokens for tier in self.context]
        if limits != sorted(set(limits)):
            raise ValueError("context: tiers must stand in order of above_prompt_tokens, each once")
        for index, tier in enumerate(self.context):
            if tier.rates is not None and (missing := set(self.rates.by_class()) - set(tier.rates.by_class())):
                raise ValueError(f"context[{index}].rates: says nothing of {', '.join(sorted(missing))}")
        names = [window.name for window in self.windows]
        if len(names) != len(set(names)):
            raise ValueError("windows: two have the same name")
        return self


class RoundingRule(_Strict):
    """How amounts become whole nano-units."""

    mode: RoundingMode = RoundingMode.HALF_EVEN
    level: RoundingLevel = RoundingLevel.LINE


class AllowanceEntry(_Strict):
    """What is free in each period: the first so many tokens, requests or units of money that are posted in it.

    ``per``: each of these has it for itself; with none, all that it is for share one.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    tokens: Annotated[StrictInt, Field(gt=0)] | None = None
    requests: Annotated[StrictInt, Field(gt=0)] | None = None
    money: Price | None = None
    period: Literal["day", "month"] = "month"
    per: tuple[Literal["tenant", "team", "key", "model"], ...] = ()
    models: Annotated[tuple[Name, ...], Field(min_length=1)] = ("*",)
    teams: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    keys: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    classes: Annotated[tuple[TokenClass, ...], Field(min_length=1)] | None = None  # None: all

    @model_validator(mode="after")
    def _one_measure(self) -> AllowanceEntry:
        if sum(measure is not None for measure in (self.tokens, self.requests, self.money)) != 1:
            raise ValueError("needs exactly one of tokens, requests and money")
        if self.money is not None and self.money.scaleb(9) != self.money.scaleb(9).to_integral_value():
            raise ValueError("money: has more than 9 decimals")
        if self.requests is not None and self.classes is not None:
            raise ValueError("classes: a free request is free of all its tokens")
        return self


class LostHitCredits(_Strict):
    """Which lost hits the platform answers for, and with what share of the money that they cost."""

    causes: Annotated[tuple[Literal["eviction", "routing", "restart", "expiry"], ...], Field(min_length=1)]
    share: Annotated[Decimal, BeforeValidator(_no_float), Field(gt=0, le=1), AfterValidator(_exact)] = Decimal(1)


class FleetCosts(_Strict):
    """What the fleet costs whoever runs it: for margins, and for savings net of what the cache's tiers cost."""

    gpu_hour: Price  # one GPU for an hour
    gpus_per_instance: Annotated[StrictInt, Field(gt=0)] = 1
    prefill_tokens_per_s: Annotated[StrictInt, Field(gt=0)]  # of one instance, measured
    decode_tokens_per_s: Annotated[StrictInt, Field(gt=0)] | None = None
    host_gib_hour: Price = Decimal(0)  # memory of hosts that is there for the cache alone
    disk_gib_hour: Price = Decimal(0)
    pool_gib_hour: Price = Decimal(0)
    host_gib: Price = Decimal(0)  # of the whole fleet
    disk_gib: Price = Decimal(0)
    pool_gib: Price = Decimal(0)


class BookFile(_Strict):
    """A whole price book. All its amounts are in one currency."""

    name: Name
    description: str = ""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    rounding: RoundingRule = RoundingRule()
    holidays: dict[Name, tuple[date, ...]] = {}  # calendars that windows name
    prefix_writes: Literal["writer", "readers"] = "writer"  # who pays for computing a prefix that others then read
    lost_hit_credits: LostHitCredits | None = None
    costs: FleetCosts | None = None
    allowance: tuple[AllowanceEntry, ...] = ()
    price: Annotated[tuple[PriceEntry, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_fit(self) -> BookFile:
        for index, entry in enumerate(self.price):
            for window in entry.windows:
                if missing := [name for name in window.except_holidays if name not in self.holidays]:
                    raise ValueError(f"price[{index}].windows: there are no holidays named {', '.join(missing)}")
        names = [allowance.name for allowance in self.allowance]
        if len(names) != len(set(names)):
            raise ValueError("allowance: two have the same name")
        return self
