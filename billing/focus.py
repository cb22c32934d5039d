"""The ledger as a FOCUS 1.2 Cost and Usage dataset (FinOps Open Cost and Usage Specification, 29 May 2025).

One line holds a charge hour, account, team, key, agent, model, instance, token class, price version and price rule, so
that it has one unit price. ``BilledCost`` is the exact sum of the ledger's charge lines. Unit prices are the book's,
per token; since each request is rounded to whole nano-units, cost and quantity × unit price differ by less than a
nano-unit a request. ``ListCost`` is what the same quantities cost without prices made for a team. Requests without a
price have no line: they are counted, never written as 0. What corrections change stands in lines of its own.

A book's currency is a dataset's: ``export`` takes the rows of one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, TextIO

from msgspec import structs

from billing.calendar import HOUR_NS
from billing.credits import CREDIT_CLASSES
from billing.errors import ReportError
from billing.meter import storage_charge
from billing.posting import STORAGE, is_correction
from billing.prices import PriceBook
from billing.rates import RATE_PER_NANO, TOOLS, NoPrice, RateCard
from billing.reports import format_money
from billing.row import LedgerRow
from billing.tables import spreadsheet_text
from tracing.record import Charge, ChargeBasis, ChargeLine

#: What each token class is called on the meter of a bill.
METERS: dict[str, str] = {
    "fresh": "Input",
    "hit_device": "Input cache read (device)",
    "hit_host": "Input cache read (host)",
    "hit_disk": "Input cache read (disk)",
    "hit_pool": "Input cache read (pool)",
    "hit_unknown": "Input cache read",
    "write": "Input cache write",
    "write_5m": "Input cache write (5 minutes)",
    "write_1h": "Input cache write (1 hour)",
    "output": "Output",
    "reasoning": "Output reasoning",
    "request": "Requests",
    "web_search": "Web searches",
    "web_fetch": "Web fetches",
    "file_search": "File searches",
    "code_execution": "Code executions",
    "minimum": "Minimum per request",
    "storage": "Cache storage",
    "allowance": "Free allowance",
    "lost_hits": "Credit for lost cache hits",
}
CHARGE_CATEGORIES = ("Usage", "Adjustment", "Credit")
_ADJUSTMENTS = ("minimum",)
#: Units of what is not counted in tokens.
_UNITS = {"request": "Requests", **dict.fromkeys(TOOLS, "Requests"), STORAGE: "Token-Hours"}
UNITS = {"Tokens", *_UNITS.values()}
_SECOND_NS, _HOUR_S, _NANO = 10**9, 3600, Decimal(1).scaleb(-9)
#: Columns that the validator wants to see and that say nothing here.
_EMPTY = (
    "AvailabilityZone",
    "CapacityReservationId",
    "CapacityReservationStatus",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountQuantity",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "CommitmentDiscountUnit",
    "InvoiceId",
)


@dataclass(frozen=True, slots=True)
class FocusOptions:
    """What the ledger does not know. ``detail``: one line for each run, with its id in ``x_RunId``."""

    issuer: str = "Platform team"
    provider: str = "keepwarm"
    publisher: str = "keepwarm"
    region: str = "local"
    detail: bool = False


@dataclass(frozen=True, slots=True)
class _Key:
    hour: int
    month: str
    tenant: str
    team: str
    key_id: str
    agent: str
    model: str
    instance: str
    region: str
    tier: str
    token_class: str
    price_version: str
    rule: str
    is_correction: bool
    run: str


#: The key of a line that is never written, for what columns there are.
_NO_KEY = _Key(0, "1970-01", "", "", "", "", "", "", "", "", "fresh", "", "", is_correction=False, run="")
#: Of a key what others than this program chose, clients among them.
_NAMES = ("tenant", "team", "model", "instance", "region", "rule", "run")


@dataclass(slots=True)
class _Sum:
    unit_price: Decimal | None
    list_unit_price: Decimal | None
    quantity: int = 0
    billed_nano: int = 0
    list_nano: int = 0
    lines: int = 0


@dataclass(slots=True)
class FocusExport:
    """Lines by key; ``unpriced`` requests have none."""

    currency: str
    options: FocusOptions
    requests: int = 0
    unpriced: int = 0
    billed_nano: int = 0
    sums: dict[_Key, _Sum] = field(default_factory=dict)

    def lines(self) -> Iterator[dict[str, str]]:
        """Go through the lines, each a mapping of column to text, in order of time."""
        for key in sorted(self.sums, key=lambda key: (key.month, key.hour, repr(key))):
            yield _line(key, self.sums[key], self.currency, self.options)

    def list_costs(self, attribute: str) -> dict[str, int]:
        """Sum list costs (nano-units) by one of a line's key attributes: ``team``, ``key_id``, ``model`` …"""
        found: dict[str, int] = {}
        for key, sums in self.sums.items():
            if key.token_class not in CREDIT_CLASSES:
                unit = getattr(key, attribute)
                found[unit] = found.get(unit, 0) + sums.list_nano
        return found

    def write(self, file: TextIO) -> int:
        """Write CSV, of no line the header alone; return the number of lines."""
        header = list(_line(_NO_KEY, _Sum(None, None), self.currency, self.options))
        writer, count = csv.DictWriter(file, header, lineterminator="\n"), 0
        writer.writeheader()
        for line in self.lines():
            writer.writerow(line)
            count += 1
        return count


def export(
    rows: Iterable[LedgerRow], books: Mapping[str, PriceBook], currency: str, options: FocusOptions = FocusOptions()
) -> FocusExport:
    """Sum the rows of one currency into FOCUS lines. Pure; cost: some 30 µs a row, memory by the lines.

    Raises ``ReportError`` for a row whose price version is not stored.
    """
    result = FocusExport(currency, options)
    for row in rows:
        if row.currency != currency:
            continue
        result.requests += row.revision == 0
        if row.amount_nano is None:
            result.unpriced += 1
            continue
        result.unpriced -= row.settles_unpriced
        book = books.get(row.price_version)
        if book is None:
            raise ReportError(f"{row.request_id}: price version {row.price_version} is not stored")
        result.billed_nano += row.amount_nano
        _add(result, row, row.charge(), book)
    return result


def _add(result: FocusExport, row: LedgerRow, charge: Charge, book: PriceBook) -> None:
    assert charge.basis is not None
    card, listed = _cards(book, charge.basis, row.usage().prompt_tokens) if not is_correction(row) else (None, None)
    for line in charge.lines:
        key = _key(row, charge.basis, line.token_class, detail=result.options.detail)
        found = result.sums.get(key)
        if found is None:
            found = result.sums[key] = _Sum(_unit_price(card, line.token_class), _unit_price(listed, line.token_class))
        found.quantity += line.quantity
        found.billed_nano += line.amount_nano
        found.list_nano += line.amount_nano if card is listed else _list_cost(line, listed, book)
        found.lines += 1


def _list_cost(line: ChargeLine, listed: RateCard | None, book: PriceBook) -> int:
    """Return what a line costs without prices of a team. What has no such price is listed at what it costs."""
    if listed is not None and (fee := listed.fee_nano(line.token_class)) is not None:
        return line.quantity * fee
    if listed is not None and line.token_class == STORAGE and listed.storage_pico is not None:
        return storage_charge(line.quantity, _SECOND_NS, listed.storage_pico, book.rounding)
    rate = None if listed is None else listed.rates.get(line.token_class)
    return line.amount_nano if rate is None else book.rounding.divide(line.quantity * rate, RATE_PER_NANO)


@lru_cache(4096)
def _card(book: PriceBook, basis: ChargeBasis, prompt_tokens: int) -> RateCard | None:
    card = book.card(
        basis.model,
        basis.at_ns,
        prompt_tokens,
        team=basis.team,
        region=basis.region,
        service_tier=basis.service_tier,
    )
    return None if isinstance(card, NoPrice) else card


def _cards(book: PriceBook, basis: ChargeBasis, prompt_tokens: int) -> tuple[RateCard | None, RateCard | None]:
    card = _card(book, basis, prompt_tokens)
    if basis.team is None or not book.has_contracts:
        return card, card
    return card, _card(book, structs.replace(basis, team=None), prompt_tokens) or card


def _unit_price(card: RateCard | None, token_class: str) -> Decimal | None:
    """Return a class's price for one token, one request, or one token that is kept for an hour, exactly."""
    if card is None or token_class == "minimum":
        return None
    if (fee := card.fee_nano(token_class)) is not None:
        return Decimal(fee).scaleb(-9)
    rate = card.storage_pico if token_class == STORAGE else card.rates.get(token_class)
    return None if rate is None else Decimal(rate).scaleb(-18)


def _quantity(sums: _Sum, token_class: str) -> str:
    """Return a quantity in its unit, with a decimal: the validator takes a whole number for none."""
    if token_class != STORAGE:
        return f"{sums.quantity}.0"
    hours = (Decimal(sums.quantity) / _HOUR_S).quantize(_NANO).normalize()
    return f"{hours:f}" if hours % 1 else f"{hours:.1f}"


def _key(row: LedgerRow, basis: ChargeBasis, token_class: str, *, detail: bool) -> _Key:
    return _Key(
        hour=row.arrived_ns // HOUR_NS,
        month=datetime.fromtimestamp(row.posted_ns // 10**9, UTC).strftime("%Y-%m"),
        tenant=row.tenant,
        team=row.team,
        key_id=row.key_id,
        agent=row.agent or "",
        model=basis.model,
        instance=row.instance or "",
        region=basis.region or "",
        tier=basis.service_tier or "",
        token_class=token_class,
        price_version=row.price_version,
        rule=basis.rule or "",
        is_correction=is_correction(row),
        run=(row.run_id or "") if detail else "",
    )


def _instant(hour: int) -> str:
    return datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _month(month: str) -> tuple[str, str]:
    year, number = int(month[:4]), int(month[5:])
    after = (year + 1, 1) if number == 12 else (year, number + 1)
    return f"{month}-01T00:00:00Z", f"{after[0]:04d}-{after[1]:02d}-01T00:00:00Z"


def _price(price: Decimal | None) -> str:
    return "" if price is None else f"{price:f}"


def _line(key: _Key, sums: _Sum, currency: str, options: FocusOptions) -> dict[str, str]:
    credits = key.token_class in CREDIT_CLASSES
    is_money = credits or key.token_class in _ADJUSTMENTS  # an amount that is no price of a quantity
    unit = _UNITS.get(key.token_class, "Tokens")
    quantity = "" if is_money else _quantity(sums, key.token_class)
    billed, listed = format_money(sums.billed_nano), format_money(sums.list_nano)
    price, list_price = _price(sums.unit_price), _price(sums.list_unit_price)
    meter, region = METERS[key.token_class], key.region or options.region
    start, end = _month(key.month)
    details = {"x_TokenClass": key.token_class, "x_PriceRule": key.rule}
    tags = {"team": key.team, "agent": key.agent, "key": key.key_id, "tenant": key.tenant, "service_tier": key.tier}
    shown: dict[str, Any] = {name: spreadsheet_text(getattr(key, name)) for name in _NAMES}
    key = replace(key, **shown)
    line = dict.fromkeys(_EMPTY, "") | {
        "BilledCost": billed,
        "BillingAccountId": key.tenant,
        "BillingAccountName": key.tenant,
        "BillingAccountType": "Tenant",
        "BillingCurrency": currency,
        "BillingPeriodStart": start,
        "BillingPeriodEnd": end,
        "ChargeCategory": "Credit" if credits else "Adjustment" if is_money else "Usage",
        "ChargeClass": "Correction" if key.is_correction and not credits else "",
        "ChargeDescription": f"{key.model} {meter}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _instant(key.hour),
        "ChargePeriodEnd": _instant(key.hour + 1),
        "ConsumedQuantity": quantity,
        "ConsumedUnit": "" if is_money else unit,
        "ContractedCost": billed,
        "ContractedUnitPrice": price,
        "EffectiveCost": billed,
        "InvoiceIssuerName": options.issuer,
        "ListCost": listed,
        "ListUnitPrice": list_price,
        "PricingCategory": "" if is_money else "Standard",
        "PricingCurrency": currency,
        "PricingCurrencyContractedUnitPrice": price,
        "PricingCurrencyEffectiveCost": billed,
        "PricingCurrencyListUnitPrice": list_price,
        "PricingQuantity": quantity,
        "PricingUnit": "" if is_money else unit,
        "ProviderName": options.provider,
        "PublisherName": options.publisher,
        "RegionId": region,
        "RegionName": region,
        "ResourceId": key.instance,
        "ResourceName": key.instance,
        "ResourceType": "Inference instance" if key.instance else "",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": key.model,
        "SkuMeter": meter,
        "SkuPriceDetails": json.dumps(details),
        "SkuPriceId": f"{key.price_version}/{key.rule}/{key.model}/{key.token_class}",
        "SubAccountId": key.team,
        "SubAccountName": key.team,
        "SubAccountType": "Team",
        "Tags": json.dumps({name: value for name, value in tags.items() if value}),
        "x_Model": key.model,
        "x_PriceVersion": key.price_version,
        "x_TokenClass": key.token_class,
        "x_ChargeLines": str(sums.lines),
    }
    return line | ({"x_RunId": key.run} if options.detail else {})
