"""What must hold in a FOCUS dataset of ours beyond what the official validator looks at. Pure.

The validator takes any cost for any quantity; here the money is compared with the ledger's, to the nano-unit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal, InvalidOperation

from billing.credits import CREDIT_CLASSES
from billing.focus import CHARGE_CATEGORIES, METERS, UNITS

#: Columns whose values are a closed list, in the specification or in ours.
CLOSED_LISTS: Mapping[str, frozenset[str]] = {
    "ChargeCategory": frozenset(CHARGE_CATEGORIES),
    "ChargeClass": frozenset(("", "Correction")),
    "ChargeFrequency": frozenset(("Usage-Based",)),
    "PricingCategory": frozenset(("", "Standard")),
    "PricingUnit": frozenset(("", *UNITS)),
    "ConsumedUnit": frozenset(("", *UNITS)),
    "ServiceCategory": frozenset(("AI and Machine Learning",)),
    "ServiceSubcategory": frozenset(("Generative AI",)),
    "SkuMeter": frozenset(METERS.values()),
    "x_TokenClass": frozenset(METERS),
}
_MONEY = ("BilledCost", "EffectiveCost", "ContractedCost", "ListCost")
_NANO = Decimal(1).scaleb(-9)


def focus_faults(lines: Iterable[Mapping[str, str]], billed_nano: int, currency: str) -> list[str]:
    """Return what is wrong with a dataset that should come to ``billed_nano``; empty when nothing is."""
    faults: list[str] = []
    total = Decimal(0)
    seen: set[tuple[str, ...]] = set()
    for number, line in enumerate(lines, 1):
        try:
            faults += [f"line {number}: {fault}" for fault in _line_faults(line, currency)]
            total += Decimal(line["BilledCost"])
        except (KeyError, InvalidOperation, ValueError) as error:
            faults.append(f"line {number}: {type(error).__name__}: {error}")
            continue
        identity = tuple(value for name, value in line.items() if name not in (*_MONEY, "x_ChargeLines"))
        if identity in seen:
            faults.append(f"line {number}: the same charge stands above")
        seen.add(identity)
    if total != Decimal(billed_nano).scaleb(-9):
        faults.append(f"the lines come to {total}, the ledger's rows to {Decimal(billed_nano).scaleb(-9)}")
    return faults


def _line_faults(line: Mapping[str, str], currency: str) -> list[str]:
    faults = [f"{name}: {line[name]!r}" for name, known in CLOSED_LISTS.items() if line[name] not in known]
    if {line["BillingCurrency"], line["PricingCurrency"]} != {currency}:
        faults.append(f"BillingCurrency: {line['BillingCurrency']}, PricingCurrency: {line['PricingCurrency']}")
    billed = Decimal(line["BilledCost"])
    if any(Decimal(line[name]) % _NANO for name in _MONEY):
        faults.append("a cost is no whole number of nano-units")
    if not billed == Decimal(line["EffectiveCost"]) == Decimal(line["ContractedCost"]):
        faults.append("BilledCost, EffectiveCost and ContractedCost differ")
    slack = int(line["x_ChargeLines"]) * _NANO
    for cost, price in (("BilledCost", "ContractedUnitPrice"), ("ListCost", "ListUnitPrice")):
        if line[price] and abs(Decimal(line[cost]) - Decimal(line["PricingQuantity"]) * Decimal(line[price])) > slack:
            faults.append(f"{cost} is not PricingQuantity times {price}")
    start, end = (datetime.fromisoformat(line[f"ChargePeriod{edge}"]) for edge in ("Start", "End"))
    if (end - start).total_seconds() != 3600:
        faults.append("the charge period is no hour")
    if line["ChargeClass"] == "" and line["BillingPeriodEnd"] <= line["ChargePeriodStart"]:
        faults.append("the charge lies after its billing period")
    if (line["ChargeCategory"] == "Credit") != (line["x_TokenClass"] in CREDIT_CLASSES):
        faults.append(f"{line['x_TokenClass']} is no {line['ChargeCategory']}")
    if line["ChargeCategory"] == "Usage" and line["ConsumedQuantity"] != line["PricingQuantity"]:
        faults.append("ConsumedQuantity and PricingQuantity differ")
    if not isinstance(json.loads(line["Tags"]), dict):
        faults.append("Tags are no object")
    return faults
