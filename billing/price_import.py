"""A price book out of the public data set ``genai-prices`` (extra ``prices``; its data is in the package: no network).

What the book can say exactly is imported; what it cannot is left out and told: prices by the time of day, units that
are no tokens, variants other than batch, flex and priority. The data knows no weekdays, holidays, currencies but the
dollar, nor contracts: an imported book is a beginning to be looked at, never a bill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from itertools import pairwise

from billing.errors import PriceBookError

#: The data's units -> ours.
_CLASSES = {
    "input_mtok": ("fresh",),
    "cache_read_mtok": ("hit",),
    "cache_write_mtok": ("write", "write_5m"),
    "cache_write_1h_mtok": ("write_1h",),
    "output_mtok": ("output",),
    "output_reasoning_mtok": ("reasoning",),
}
#: Its prices by the thousand uses -> the tool.
_TOOLS = {"web_searches_kcount": "web_search", "storage_searches_kcount": "file_search"}
_TIERS = ({"processing": "batch"}, {"service_tier": "priority"}, {"service_tier": "flex"})


@dataclass(slots=True)
class Imported:
    """The book as TOML, and what was left out and why, one line each."""

    toml: str
    models: int = 0
    left_out: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Entry:
    base: dict[str, Decimal]
    above: dict[int, dict[str, Decimal]]
    since: date | None = None
    until: date | None = None
    tiers: dict[str, dict[str, Decimal]] = field(default_factory=dict)
    tools: dict[str, Decimal] = field(default_factory=dict)


class _CannotSay(Exception):
    """The data says something that a book cannot."""


def import_genai_prices(provider_id: str) -> Imported:
    """Return one provider's prices as a book. Raises ``PriceBookError`` for a provider that there is none of.

    Raises ``ImportError`` without the extra ``prices``.
    """
    from genai_prices.data import providers

    provider = next((known for known in providers if known.id == provider_id), None)
    if provider is None:
        names = ", ".join(sorted(known.id for known in providers))
        raise PriceBookError("genai-prices", [f"there is no provider {provider_id!r}, only {names}"])
    result = Imported("")
    parts = [f'name = "{provider_id} (genai-prices)"', 'currency = "USD"', ""]
    for model in provider.models:
        try:
            entries = _entries(model.prices, model.price_variants or (), f"{model.id}", result.left_out)
        except _CannotSay as reason:
            result.left_out.append(f"{model.id}: {reason}")
            continue
        result.models += bool(entries)
        parts += [_toml(model.id, entry) for entry in entries]
    result.toml = "\n".join(parts)
    return result


def _entries(prices: object, variants: Iterable[object], name: str, left_out: list[str]) -> list[_Entry]:
    """Return a model's prices in order of time, the newest first, as the first that is in force counts."""
    listed = prices if isinstance(prices, list) else [None]
    found: list[_Entry] = []
    for part in listed:
        constraint = None if part is None else part.constraint
        kind = type(constraint).__name__
        if kind not in ("NoneType", "StartDateConstraint"):
            raise _CannotSay("its price depends on the time of day: add a window by hand")
        values = prices if part is None else part.prices
        base, above = _rates(values, name, left_out)
        if "fresh" not in base:
            raise _CannotSay("it has no price for input tokens")
        found.append(_Entry(base, above, since=getattr(constraint, "start_date", None), tools=_tools(values)))
    found.sort(key=lambda entry: entry.since or date.min)
    for entry, following in pairwise(found):
        entry.until = following.since
    for variant in variants:
        _add_tier(found[-1], variant, name, left_out)
    return found


def _add_tier(entry: _Entry, variant: object, name: str, left_out: list[str]) -> None:
    when = dict(getattr(variant, "when", {}))
    if when not in _TIERS:
        if when != {"service_tier": "default"}:
            left_out.append(f"{name}: the variant {when}")
        return
    base, above = _rates(getattr(variant, "prices", None), name, left_out)
    tier = next(iter(when.values()))
    factors = {}
    for token_class, rate in base.items():
        standard = entry.base.get(token_class)
        if not standard or not _is_exact(factor := rate / standard) or factor * standard != rate:
            left_out.append(f"{name}: the tier {tier}: {token_class} is in no exact ratio to the standard price")
            return
        factors[token_class] = factor
    for limit, rates in above.items():
        if any(rates[c] != entry.above.get(limit, {}).get(c, Decimal(-1)) * factors[c] for c in rates if c in factors):
            left_out.append(f"{name}: the tier {tier}: long prompts have another ratio")
            return
    entry.tiers[tier] = factors


def _is_exact(number: Decimal) -> bool:
    exponent = number.normalize().as_tuple().exponent
    return isinstance(exponent, int) and exponent >= -12


def _rates(prices: object, name: str, left_out: list[str]) -> tuple[dict[str, Decimal], dict[int, dict[str, Decimal]]]:
    """Return the base rates, and those above each length, every class that has a base in each."""
    base: dict[str, Decimal] = {}
    steps: dict[int, dict[str, Decimal]] = {}
    values: Mapping[str, object] = vars(prices)
    for unit, price in values.items():
        if price is None or unit in _TOOLS:
            continue
        classes = _CLASSES.get(unit)
        if classes is None:
            left_out.append(f"{name}: {unit}")
            continue
        for token_class in classes:
            base[token_class] = price if isinstance(price, Decimal) else getattr(price, "base")  # noqa: B009
            for step in () if isinstance(price, Decimal) else getattr(price, "tiers"):  # noqa: B009
                steps.setdefault(step.start, {})[token_class] = step.price
    above: dict[int, dict[str, Decimal]] = {}
    current = base
    for limit in sorted(steps):
        current = above[limit] = current | steps[limit]
    return base, above


def _tools(prices: object) -> dict[str, Decimal]:
    """Return what one use of each tool costs."""
    values: Mapping[str, object] = vars(prices)
    return {tool: price / 1000 for unit, tool in _TOOLS.items() if isinstance(price := values.get(unit), Decimal)}


def _toml(model: str, entry: _Entry) -> str:
    lines = ["[[price]]", f'models = ["{model}"]']
    lines += [f"effective_from = {entry.since.isoformat()}T00:00:00Z"] if entry.since else []
    lines += [f"effective_to = {entry.until.isoformat()}T00:00:00Z"] if entry.until else []
    lines.append(f"rates = {_table(entry.base)}")
    lines += [f"tool_fees = {_table(entry.tools)}"] if entry.tools else []
    for tier, factors in entry.tiers.items():
        lines.append(f"service_tiers.{tier} = {{ multipliers = {_table(factors)} }}")
    for limit, rates in entry.above.items():
        lines += ["[[price.context]]", f"above_prompt_tokens = {limit}", f"rates = {_table(rates)}"]
    return "\n".join(lines) + "\n"


def _table(rates: Mapping[str, Decimal]) -> str:
    return "{ " + ", ".join(f"{name} = {rate:f}" for name, rate in rates.items()) + " }"
