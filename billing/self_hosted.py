"""A price book for engines of one's own: what a token costs follows from what a GPU costs and how fast it is. Pure.

::

    instance second  = GPU hour × GPUs of an instance / 3600
    price of a class = instance second / (tokens a second × utilization) × (1 + margin), for a million tokens

Tokens a second are of one whole instance, measured under the load that it is run at: prefill for ``fresh``, generation
(all running requests together) for ``output``, reading back for each tier's hits (measured as prompt tokens a second of
prompts that were served from that tier alone). Utilization is the share of paid time in which the instance works; what
it idles is paid by the tokens that it computes. A price is rounded up to the next 10⁻⁶ of the currency, so that the sum
never falls short of the cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_UP, Decimal, localcontext

from billing.errors import PriceBookError

_PLACES = Decimal(1).scaleb(-6)
_MILLION = Decimal(10**6)
TIERS = ("device", "host", "disk", "pool")


@dataclass(frozen=True, slots=True)
class Throughput:
    """What one instance does in a second, in tokens. ``hits``: by tier."""

    prefill: int
    decode: int
    hits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostingCost:
    """What an instance costs. Money in the book's currency."""

    gpu_hour: Decimal
    gpus_per_instance: int = 1
    utilization: Decimal = Decimal(1)
    margin: Decimal = Decimal(0)


def token_price(cost: HostingCost, tokens_per_s: int) -> Decimal:
    """Return the price of a million tokens that are made at so many a second."""
    with localcontext() as context:
        context.prec = 50
        instance_second = cost.gpu_hour * cost.gpus_per_instance / 3600
        exact = instance_second / (tokens_per_s * cost.utilization) * (1 + cost.margin) * _MILLION
        return exact.quantize(_PLACES, rounding=ROUND_UP)


def self_hosted_book(model: str, cost: HostingCost, speed: Throughput, currency: str = "USD") -> str:
    """Return the book as TOML. Raises ``PriceBookError`` for what no book can be made of."""
    problems = [f"{name} must be above 0" for name, value in _positive(cost, speed).items() if value <= 0]
    problems += [f"there is no tier {tier!r}, only {', '.join(TIERS)}" for tier in speed.hits if tier not in TIERS]
    if cost.utilization > 1:
        problems.append("utilization is a share: at most 1")
    if cost.margin <= -1:
        problems.append("margin must be above -1")
    if problems:
        raise PriceBookError("from GPU hours", problems)
    rates = {"fresh": token_price(cost, speed.prefill)}
    rates |= {f"hit_{tier}": token_price(cost, speed.hits[tier]) for tier in TIERS if tier in speed.hits}
    rates["output"] = token_price(cost, speed.decode)
    lines = "\n".join(f"{name} = {rate:f}" for name, rate in rates.items())
    return f"""\
name = "self-hosted"
description = "{cost.gpu_hour} {currency} a GPU hour, {cost.gpus_per_instance} GPUs an instance, \
utilization {cost.utilization}, margin {cost.margin}"
currency = "{currency}"

[costs]
gpu_hour = {cost.gpu_hour}
gpus_per_instance = {cost.gpus_per_instance}
prefill_tokens_per_s = {speed.prefill}
decode_tokens_per_s = {speed.decode}

[[price]]
models = ["{model}"]

[price.rates]
{lines}
"""


def _positive(cost: HostingCost, speed: Throughput) -> dict[str, Decimal | int]:
    named: dict[str, Decimal | int] = {
        "the GPU hour": cost.gpu_hour,
        "GPUs an instance": cost.gpus_per_instance,
        "utilization": cost.utilization,
        "prefill tokens a second": speed.prefill,
        "decode tokens a second": speed.decode,
    }
    return named | {f"{tier} hit tokens a second": rate for tier, rate in speed.hits.items()}
