"""The price book: from (model, instant, prompt length, team, region, service tier) to integer rates, or to no price.

The first entry of the file that fits the model, the team and the region and is in force at the request's arrival
counts. Its base rates are changed by the context tier (of the whole prompt, hits and writes included), then by the
calendar window, then by the service tier. All of these combinations are computed when the book is loaded, so whatever
cannot be held exactly stops the start. A book's version is a digest of its content: comments and order of keys do not
change it, any price does.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from importlib import resources
from itertools import product
from pathlib import Path

from pydantic import ValidationError

from billing.calendar import CalendarWindow
from billing.errors import PriceBookError
from billing.price_file import BookFile, PriceEntry
from billing.rates import PRICE_DECIMALS, NoPrice, RateCard, Rounding

#: Service tiers that mean "none": what APIs report for an ordinary request.
STANDARD_TIERS = frozenset({"default", "standard", "auto", "on_demand"})
#: Lookups kept per book; model names come from clients, so the number is bounded.
LOOKUP_CACHE_ENTRIES = 4096

_PLAIN = (-1, -1, "")  # no context tier, no window, no service tier
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _ns(instant: datetime | None, default: int) -> int:
    """Return the instant in ns since the epoch, exactly."""
    if instant is None:
        return default
    since = instant.astimezone(UTC) - _EPOCH
    return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


@dataclass(frozen=True, slots=True)
class CacheTerms:
    """What a provider says of its cache: prompts below the minimum are not kept, others for so long after their use."""

    minimum_tokens: int = 0
    lifetime_s: int | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A price entry, ready for lookup. Cards are keyed by (context tier, window, service tier); -1 and "" are none."""

    models: re.Pattern[str]
    teams: frozenset[str] | None
    regions: frozenset[str] | None
    from_ns: int
    to_ns: int
    context_above: tuple[int, ...]
    windows: tuple[CalendarWindow, ...]
    cards: Mapping[tuple[int, int, str], RateCard]
    cache_terms: CacheTerms

    def fits(self, model: str, team: str | None, region: str | None) -> bool:
        return (
            self.models.fullmatch(model) is not None
            and (self.teams is None or team in self.teams)
            and (self.regions is None or region in self.regions)
        )

    def card(self, at_ns: int, prompt_tokens: int, service_tier: str) -> RateCard | NoPrice:
        context = -1
        for index, above in enumerate(self.context_above):
            if prompt_tokens > above:
                context = index
        window = next((index for index, window in enumerate(self.windows) if window.covers(at_ns)), -1)
        card = self.cards.get((context, window, service_tier))
        return NoPrice("no_service_tier") if card is None else card


class PriceBook:
    """An immutable set of prices in one currency. Lookup is pure; its cost is a few µs whatever the book's size."""

    def __init__(self, file: BookFile, source: str) -> None:
        self.name = file.name
        self.currency = file.currency
        self.rounding = Rounding(file.rounding.mode, file.rounding.level)
        self.file = file
        #: The book's content in one canonical form, from which ``from_body`` makes it again.
        content = file.model_dump(mode="json", exclude_defaults=True)  # a key that is new later changes no old version
        self.body = json.dumps(content, sort_keys=True, separators=(",", ":"))
        #: Digest of the content.
        self.version = hashlib.sha256(self.body.encode()).hexdigest()[:16]
        problems = _shadowed(file.price)
        entries = []
        for index, entry in enumerate(file.price):
            compiled, faults = _compile(entry, f"price[{index}]", file.holidays)
            problems += faults
            entries.append(compiled)
        if problems:
            raise PriceBookError(source, problems)
        self._entries = tuple(entries)
        #: Whether some prices are for some teams only.
        self.has_contracts = any(entry.teams is not None for entry in entries)
        self._fitting = lru_cache(LOOKUP_CACHE_ENTRIES)(self._find_fitting)

    @classmethod
    def load(cls, path: Path) -> PriceBook:
        """Read a TOML file. Raises ``PriceBookError`` with every problem and its path in the file."""
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise PriceBookError(str(path), [error.strerror or str(error)]) from error
        except UnicodeDecodeError as error:
            raise PriceBookError(str(path), [f"no text in UTF-8: {error.reason} at byte {error.start:,}"]) from error
        return cls.from_toml(text, str(path))

    @classmethod
    def from_toml(cls, text: str, source: str = "(text)") -> PriceBook:
        """Read TOML text. Raises ``PriceBookError``."""
        try:
            return cls(BookFile.model_validate(tomllib.loads(text, parse_float=Decimal)), source)
        except tomllib.TOMLDecodeError as error:
            raise PriceBookError(source, [str(error)]) from error
        except ValidationError as error:
            raise PriceBookError(source, _explain(error)) from error

    @classmethod
    def from_body(cls, body: str, source: str = "(stored version)") -> PriceBook:
        """Make a book again from ``PriceBook.body``. Raises ``PriceBookError``."""
        try:
            return cls(BookFile.model_validate_json(body), source)
        except ValidationError as error:
            raise PriceBookError(source, _explain(error)) from error

    @classmethod
    def default(cls) -> PriceBook:
        """Return the packaged book for the default model, self-hosted."""
        text = (resources.files("billing.books") / "default.toml").read_text("utf-8")
        return cls.from_toml(text, "billing/books/default.toml")

    def card(
        self,
        model: str,
        at_ns: int,
        prompt_tokens: int,
        *,
        team: str | None = None,
        region: str | None = None,
        service_tier: str | None = None,
    ) -> RateCard | NoPrice:
        """Look up the rates of a request that arrived at ``at_ns`` with so many prompt tokens, cached ones included."""
        entry = self._in_force(model, at_ns, team, region)
        if isinstance(entry, NoPrice):
            return entry
        tier = "" if service_tier is None or service_tier in STANDARD_TIERS else service_tier
        return entry.card(at_ns, prompt_tokens, tier)

    def storage_rate(self, model: str, at_ns: int, team: str | None = None, region: str | None = None) -> int | NoPrice:
        """Look up what keeping a million tokens for an hour costs, in pico-units."""
        entry = self._in_force(model, at_ns, team, region)
        if isinstance(entry, NoPrice):
            return entry
        rate = entry.cards[_PLAIN].storage_pico
        return NoPrice("no_rate:storage") if rate is None else rate

    def cache_terms(self, model: str, at_ns: int, team: str | None = None, region: str | None = None) -> CacheTerms:
        """Look up what the price says of the cache; without a price, nothing."""
        entry = self._in_force(model, at_ns, team, region)
        return CacheTerms() if isinstance(entry, NoPrice) else entry.cache_terms

    def _in_force(self, model: str, at_ns: int, team: str | None, region: str | None) -> _Entry | NoPrice:
        fitting = self._fitting(model, team, region)
        for entry in fitting:
            if entry.from_ns <= at_ns < entry.to_ns:
                return entry
        return NoPrice("not_in_force" if fitting else "no_price")

    def _find_fitting(self, model: str, team: str | None, region: str | None) -> tuple[_Entry, ...]:
        return tuple(entry for entry in self._entries if entry.fits(model, team, region))


def _pico(value: Decimal, where: str, faults: list[str]) -> int:
    scaled = value.scaleb(PRICE_DECIMALS)
    if scaled != scaled.to_integral_value():
        faults.append(f"{where}: {value} has more than {PRICE_DECIMALS} decimals")
    return int(scaled)


def _nano(value: Decimal, where: str, faults: list[str]) -> int:
    scaled = value.scaleb(9)
    if scaled != scaled.to_integral_value():
        faults.append(f"{where}: {value} has more than 9 decimals")
    return int(scaled)


def _compile(entry: PriceEntry, where: str, holidays: Mapping[str, tuple[date, ...]]) -> tuple[_Entry, list[str]]:
    """Compute every card of an entry; return it with what is wrong, led by the path."""
    faults: list[str] = []
    fee = _nano(entry.request_fee, f"{where}.request_fee", faults)
    minimum = _nano(entry.request_minimum, f"{where}.request_minimum", faults)
    storage = None
    if entry.storage_per_hour is not None:
        storage = _pico(entry.storage_per_hour, f"{where}.storage_per_hour", faults)
    tools: dict[str, int] = {
        tool: _nano(price, f"{where}.tool_fees.{tool}", faults) for tool, price in entry.tool_fees.items()
    }
    cards = {}
    base = entry.rates.by_class()
    axes = (range(-1, len(entry.context)), range(-1, len(entry.windows)), ("", *entry.service_tiers))
    for context, window, tier in product(*axes):
        rates, rule = base, f"{where} {entry.models[0]}"
        if context >= 0:
            rates = entry.context[context].apply(rates)
            rule += f" above {entry.context[context].above_prompt_tokens}"
        if window >= 0:
            rates = entry.windows[window].apply(rates)
            rule += f" window {entry.windows[window].name}"
        if tier:
            rates = entry.service_tiers[tier].apply(rates)
            rule += f" tier {tier}"
        exact = {name: _pico(rate, f"{rule}: {name}", faults) for name, rate in rates.items()}
        cards[context, window, tier] = RateCard(rule, exact, fee, minimum, storage, tools)
    compiled = _Entry(
        models=re.compile("|".join(translate(pattern) for pattern in entry.models)),
        teams=None if entry.teams is None else frozenset(entry.teams),
        regions=None if entry.regions is None else frozenset(entry.regions),
        from_ns=_ns(entry.effective_from, -(2**63)),
        to_ns=_ns(entry.effective_to, 2**63),
        context_above=tuple(tier.above_prompt_tokens for tier in entry.context),
        windows=tuple(window.window(holidays) for window in entry.windows),
        cards=cards,
        cache_terms=CacheTerms(entry.cache_minimum_tokens or 0, entry.cache_lifetime_s),
    )
    return compiled, faults


def _shadowed(entries: tuple[PriceEntry, ...]) -> list[str]:
    """Find entries that can never count because an earlier one takes everything that they fit."""
    problems = []
    for later, entry in enumerate(entries):
        for earlier in range(later):
            if _covers(entries[earlier], entry):
                problems.append(f"price[{later}]: never counts, price[{earlier}] stands before it and covers it")
                break
    return problems


def _covers(first: PriceEntry, second: PriceEntry) -> bool:
    low, high = -(2**63), 2**63
    return (
        all(
            any(p == q or q == "*" or ("*" not in p and fnmatchcase(p, q)) for q in first.models) for p in second.models
        )
        and (first.teams is None or (second.teams is not None and set(second.teams) <= set(first.teams)))
        and (first.regions is None or (second.regions is not None and set(second.regions) <= set(first.regions)))
        and _ns(first.effective_from, low) <= _ns(second.effective_from, low)
        and _ns(first.effective_to, high) >= _ns(second.effective_to, high)
    )


def _explain(error: ValidationError) -> list[str]:
    """Say each problem on one line, led by its path as one would write it."""
    faults = error.errors()
    lines = []
    for fault in faults:
        loc = fault["loc"]
        if fault["type"] == "too_short" and any(other["loc"][:-1][: len(loc)] == loc for other in faults):
            continue  # nothing is left in this list because something in it is wrong, which is told itself
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        known = "there is no such key" if fault["type"] == "extra_forbidden" else fault["msg"]
        lines.append(f"{path or 'book'}: {known.removeprefix('Value error, ')}")
    return lines
