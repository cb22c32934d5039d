"""What a run would have been billed: the production meter over simulated usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from billing.meter import charge
from billing.prices import PriceBook
from gateway.replay.engine_model import Flight
from tracing.record import HitSource, Usage, UsageSource


@dataclass(frozen=True, slots=True)
class Pricing:
    """Which prices, for which model name, and what moment the virtual clock starts at."""

    book: PriceBook
    model: str
    starts_ns: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Sums in nano-units. ``unpriced``: requests without a price by reason; they are in neither sum."""

    currency: str
    price_version: str
    amount_nano: int
    saved_nano: int
    unpriced: dict[str, int]


def price(flights: Iterable[Flight], pricing: Pricing) -> Cost:
    """Bill every flight."""
    amount = saved = 0
    unpriced: Counter[str] = Counter()
    for flight in flights:
        at_ns = pricing.starts_ns + round(flight.arrived_s * 1e9)
        bill = charge(_usage(flight), pricing.book, pricing.model, at_ns)
        if bill.amount_nano is None:
            unpriced[bill.unpriced_reason or ""] += 1
        else:
            amount += bill.amount_nano
            saved += bill.saved_nano or 0
    return Cost(pricing.book.currency, pricing.book.version, amount, saved, dict(unpriced))


def _usage(flight: Flight) -> Usage:
    device, host, disk, pool = flight.hit_tokens
    return Usage(
        fresh_tokens=flight.request.prompt_tokens - sum(flight.hit_tokens),
        hit_device_tokens=device,
        hit_host_tokens=host,
        hit_disk_tokens=disk,
        hit_pool_tokens=pool,
        output_tokens=flight.request.output_tokens,
        source=UsageSource.ENGINE,
        hit_source=HitSource.REPORTED,
    )
