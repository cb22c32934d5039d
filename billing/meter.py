"""The meter: usage and a price book in, a charge out. Pure integers, no clock, no I/O.

A line is ``quantity * rate / 10**9`` nano-units, rounded to a whole one as the book says; the amount is exactly the sum
of the lines. What the cache saved comes from the same rates, looked up once: the hit tokens at the price of fresh ones,
less what they cost, less what writing to the cache cost beyond computing.

With rows alone (token counts from any other observer) the same money follows: ``charge`` needs nothing but the counts,
the book, the model and the instant.
"""

from __future__ import annotations

from billing.calendar import HOUR_NS
from billing.prices import PriceBook
from billing.rates import RATE_PER_NANO, NoPrice, RateCard, Rounding, RoundingLevel
from tracing.record import Charge, ChargeBasis, ChargeLine, Usage, UsageSource

NANO_PER_UNIT = 10**9


def charge(
    usage: Usage | None,
    book: PriceBook,
    model: str,
    at_ns: int,
    *,
    team: str | None = None,
    region: str | None = None,
    service_tier: str | None = None,
) -> Charge:
    """Price one answer at the rates of the instant ``at_ns``, the request's arrival.

    Nothing computed costs 0. Unknown usage, an unknown price, or tokens of a class without a rate make the charge
    unpriced: ``amount_nano`` is ``None`` and ``unpriced_reason`` says why. Cost: a lookup and a dozen multiplications.
    """
    basis = ChargeBasis(model, at_ns, team, region, service_tier)
    if usage is None or usage.source is UsageSource.MISSING:
        return _unpriced(book, basis, "usage_missing", usage)
    if usage.source is UsageSource.NONE:
        return Charge(book.currency, book.version, amount_nano=0, saved_nano=0, basis=basis)
    card = book.card(model, at_ns, usage.prompt_tokens, team=team, region=region, service_tier=service_tier)
    if isinstance(card, NoPrice):
        return _unpriced(book, basis, card.reason, usage)
    basis = ChargeBasis(model, at_ns, team, region, service_tier, card.rule)
    quantities = _quantities(usage, card)
    for token_class in quantities:
        if token_class not in card.rates:
            return _unpriced(book, basis, f"no_rate:{token_class}", usage)
    for tool, _ in usage.tool_uses:
        if tool not in card.tool_fees_nano:
            return _unpriced(book, basis, f"no_rate:{tool}", usage)
    fees = _fees(usage, card)
    lines = _lines(quantities, fees, card, book.rounding)
    return Charge(
        currency=book.currency,
        price_version=book.version,
        lines=tuple(lines),
        amount_nano=sum(line.amount_nano for line in lines),
        saved_nano=_saved(quantities, fees, card, book.rounding),
        basis=basis,
    )


def recharge(usage: Usage, book: PriceBook, basis: ChargeBasis) -> Charge:
    """Compute a charge again from the basis it was made on."""
    return charge(
        usage, book, basis.model, basis.at_ns, team=basis.team, region=basis.region, service_tier=basis.service_tier
    )


def storage_charge(tokens: int, duration_ns: int, pico_per_mtok_hour: int, rounding: Rounding) -> int:
    """Return the nano-units for keeping ``tokens`` cached for ``duration_ns``, prorated, rounded once."""
    return rounding.divide(tokens * duration_ns * pico_per_mtok_hour, RATE_PER_NANO * HOUR_NS)


def _unpriced(book: PriceBook, basis: ChargeBasis, reason: str, usage: Usage | None) -> Charge:
    """Return no amount. How often tools were used stands in lines, so that a later price finds it."""
    lines = () if usage is None else tuple(ChargeLine(tool, uses, 0) for tool, uses in usage.tool_uses)
    return Charge(book.currency, book.version, lines, unpriced_reason=reason, basis=basis)


def _quantities(usage: Usage, card: RateCard) -> dict[str, int]:
    """Return the token classes that are not empty. Reasoning is its own line only where it has its own rate."""
    apart = usage.reasoning_tokens if "reasoning" in card.rates else 0
    classes = {
        "fresh": usage.fresh_tokens,
        "hit_device": usage.hit_device_tokens,
        "hit_host": usage.hit_host_tokens,
        "hit_disk": usage.hit_disk_tokens,
        "hit_pool": usage.hit_pool_tokens,
        "hit_unknown": usage.hit_unknown_tokens,
        "write": usage.write_tokens,
        "write_5m": usage.write_5m_tokens,
        "write_1h": usage.write_1h_tokens,
        "output": usage.output_tokens - apart,
        "reasoning": apart,
    }
    return {name: quantity for name, quantity in classes.items() if quantity}


def _fees(usage: Usage, card: RateCard) -> list[ChargeLine]:
    """Return what is charged for the request itself and for each use of a tool."""
    fees = [ChargeLine("request", 1, card.request_fee_nano)] if card.request_fee_nano else []
    return fees + [ChargeLine(tool, uses, uses * card.tool_fees_nano[tool]) for tool, uses in usage.tool_uses]


def _lines(quantities: dict[str, int], fees: list[ChargeLine], card: RateCard, rounding: Rounding) -> list[ChargeLine]:
    """Price each class; add the fees and what is missing to the minimum."""
    exact = {name: quantity * card.rates[name] for name, quantity in quantities.items()}
    if rounding.level is RoundingLevel.LINE:
        amounts = {name: rounding.divide(value, RATE_PER_NANO) for name, value in exact.items()}
    else:
        amounts = _share(exact, rounding.divide(sum(exact.values()), RATE_PER_NANO))
    lines = [ChargeLine(name, quantity, amounts[name]) for name, quantity in quantities.items()]
    lines += fees
    below = card.request_minimum_nano - sum(line.amount_nano for line in lines)
    if below > 0:
        lines.append(ChargeLine("minimum", 1, below))
    return lines


def _share(exact: dict[str, int], total: int) -> dict[str, int]:
    """Split a rounded total over the classes: each its whole nano-units, the rest by largest remainder."""
    amounts = {name: value // RATE_PER_NANO for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: exact[name] % RATE_PER_NANO, reverse=True)
    for name in by_remainder[: total - sum(amounts.values())]:
        amounts[name] += 1
    return amounts


def _saved(quantities: dict[str, int], fees: list[ChargeLine], card: RateCard, rounding: Rounding) -> int:
    """Return what the same tokens cost without a cache, less what they cost, rounded once.

    Exact values are compared, so rounding of lines can't make a saving look like a loss.
    """
    fresh = card.rates["fresh"]
    fee = sum(line.amount_nano for line in fees) * RATE_PER_NANO
    minimum = card.request_minimum_nano * RATE_PER_NANO
    cost = fee + sum(quantity * card.rates[name] for name, quantity in quantities.items())
    gain = sum(
        quantity * (fresh - card.rates[name])
        for name, quantity in quantities.items()
        if name.startswith(("hit_", "write"))
    )
    return rounding.divide(max(cost + gain, minimum) - max(cost, minimum), RATE_PER_NANO)
