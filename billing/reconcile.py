"""The ledger against others' books: an engine's own counters, and a provider's invoice. Pure.

Nothing is made to fit: each difference is a line, and who reads it decides (``keepwarm ledger reprice`` corrects).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import TextIO

from prometheus_client.parser import text_string_to_metric_families

from billing.errors import ReconcileError
from billing.reports import Report, Sums

#: Sample names of engines' counters, by what they count. The first that an engine has counts.
ENGINE_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "requests": ("sglang:num_requests_total", "vllm:request_success_total"),
    "prompt_tokens": ("sglang:prompt_tokens_total", "vllm:prompt_tokens_total"),
    "hit_tokens": ("sglang:cached_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    "output_tokens": ("sglang:generation_tokens_total", "vllm:generation_tokens_total"),
}


#: Counters of hits by where they came from: the sample, its label, and which tiers of ours each value is.
TIER_COUNTERS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("sglang:cached_tokens_total", "cache_source", {"device": "device", "host": "host", "storage": "storage"}),
    (
        "vllm:prompt_tokens_cached_by_source_total",
        "source",
        {
            "device": "device",
            "host": "host",
            "disk": "storage",
            "p2p": "storage",
            "external_unspecified": "storage",
        },
    ),
)
TIER_HITS = ("device hits", "host hits", "storage hits")


@dataclass(frozen=True, slots=True)
class Line:
    """One compared number. ``theirs`` is ``None`` where they say nothing of it."""

    what: str
    ours: Decimal
    theirs: Decimal | None

    @property
    def difference(self) -> Decimal:
        """Theirs less ours."""
        return Decimal(0) if self.theirs is None else self.theirs - self.ours

    def agrees(self, tolerance: Decimal) -> bool:
        """Tell whether they differ by no more than a share of the larger one."""
        if self.theirs is None:
            return False
        return abs(self.difference) <= tolerance * max(abs(self.ours), abs(self.theirs))


def engine_counts(exposition: str) -> dict[str, int]:
    """Read an engine's counters from its ``/metrics``, summed over their labels. Raises ``ReconcileError``."""
    samples: dict[str, Decimal] = {}
    by_tier: dict[str, int] = {}
    try:
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, Decimal(0)) + Decimal(sample.value)
                for tier in _tiers_of(sample.name, sample.labels):
                    by_tier[tier] = by_tier.get(tier, 0) + int(sample.value)
    except ValueError as error:
        raise ReconcileError(f"this is no Prometheus exposition: {error}") from error
    found = {}
    for what, names in ENGINE_COUNTERS.items():
        name = next((name for name in names if name in samples), None)
        if name is not None:
            found[what] = int(samples[name])
    if not found:
        raise ReconcileError("none of the counters of SGLang or vLLM is in it")
    if sum(by_tier.values()) == found.get("hit_tokens"):  # else some hits are counted without their tier
        found |= {name: by_tier.get(name.removesuffix(" hits"), 0) for name in TIER_HITS}
    return found


def _tiers_of(sample: str, labels: Mapping[str, str]) -> list[str]:
    return [
        tiers[labels[label]] for name, label, tiers in TIER_COUNTERS if name == sample and labels.get(label) in tiers
    ]


def with_engine(sums: Sums, before: Mapping[str, int], after: Mapping[str, int]) -> list[Line]:
    """Compare what an instance's rows of a time say with what its counters rose by in it, by tier where both say so.

    Raises ``ReconcileError`` when a counter fell: the engine was restarted in between.
    """
    ours = {
        "requests": sums.requests,
        "prompt_tokens": sums.prompt_tokens,
        "hit_tokens": sums.hit_tokens,
        "output_tokens": sums.output_tokens,
    }
    if TIER_HITS[0] in after and not sums.hit_unknown_tokens:
        storage = sums.hit_disk_tokens + sums.hit_pool_tokens
        ours |= dict(zip(TIER_HITS, (sums.hit_device_tokens, sums.hit_host_tokens, storage), strict=True))
    lines = []
    for what, count in ours.items():
        rise = after[what] - before.get(what, 0) if what in after else None
        if rise is not None and rise < 0:
            raise ReconcileError(f"{what} fell by {-rise}: the engine was restarted in this time")
        lines.append(Line(what, Decimal(count), None if rise is None else Decimal(rise)))
    return lines


#: Nobody is billed so much, be it money or tokens.
_NO_NUMBER = Decimal(10) ** 18


@dataclass(frozen=True, slots=True)
class InvoiceColumns:
    """What an invoice's columns are called. Empty: it has none such."""

    day: str = "date"
    model: str = "model"
    cost: str = "cost"
    prompt_tokens: str = ""  # hits included
    hit_tokens: str = ""
    output_tokens: str = ""


def read_invoice(file: TextIO, columns: InvoiceColumns) -> dict[tuple[str, str], dict[str, Decimal]]:
    """Sum an invoice CSV by (day, model). Raises ``ReconcileError`` with the line of what cannot be read."""
    reader = csv.DictReader(file)
    try:
        return _sums_of(reader, columns)
    except csv.Error as error:  # a field without an end
        raise ReconcileError(f"line {reader.line_num + 1} of the invoice: {error}") from error


def _sums_of(reader: csv.DictReader[str], columns: InvoiceColumns) -> dict[tuple[str, str], dict[str, Decimal]]:
    measures = {
        name: column
        for name in ("cost", "prompt_tokens", "hit_tokens", "output_tokens")
        if (column := getattr(columns, name))
    }
    needed = [columns.day, columns.model, *measures.values()]
    if missing := [column for column in needed if column not in (reader.fieldnames or ())]:
        raise ReconcileError(
            f"the invoice has no column {', '.join(missing)}, only {', '.join(reader.fieldnames or ())}"
        )
    found: dict[tuple[str, str], dict[str, Decimal]] = {}
    for line in reader:
        try:
            day = datetime.fromisoformat(line[columns.day]).astimezone(UTC) if "T" in line[columns.day] else None
            place = (line[columns.day][:10] if day is None else day.strftime("%Y-%m-%d"), line[columns.model])
            sums = found.setdefault(place, dict.fromkeys(measures, Decimal(0)))
            for name, column in measures.items():
                sums[name] += _number(line[column], column)
        except (ValueError, TypeError, OverflowError) as error:  # TypeError: the line ends before that column
            raise ReconcileError(f"line {reader.line_num} of the invoice: {error}") from error
    return found


def _number(text: str | None, column: str) -> Decimal:
    try:
        number = Decimal((text or "").replace(",", "").strip() or "0")
    except InvalidOperation:
        number = Decimal("NaN")
    if text is None or not (number.is_finite() and abs(number) < _NO_NUMBER):
        raise ValueError(f"{column} is {'missing' if text is None else repr(text)[:40]}")
    return number


def with_invoice(report: Report, invoice: Mapping[tuple[str, str], Mapping[str, Decimal]], currency: str) -> list[Line]:
    """Compare a report by (day, served_model) with an invoice; what only one of them has is compared with 0."""
    ours: dict[tuple[str, str], Sums] = {}
    for group in report.groups:
        if group.currency == currency:
            day, model = group.key
            ours.setdefault((day, model), Sums()).add(group.sums)
    measures: Sequence[str] = list(next(iter(invoice.values()))) if invoice else ["cost"]
    lines = []
    for place in sorted({*ours, *invoice}):
        sums = ours.get(place, Sums())
        for name in measures:
            mine = Decimal(sums.amount_nano).scaleb(-9) if name == "cost" else Decimal(getattr(sums, name))
            lines.append(Line(f"{' '.join(place)} {name}", mine, invoice.get(place, {}).get(name, Decimal(0))))
    return lines


def render(lines: Iterable[Line], tolerance: Decimal) -> str:
    """Return one line for each comparison and a last one that counts."""
    text, apart = [], 0
    listed = list(lines)
    for line in listed:
        agrees = line.agrees(tolerance)
        apart += not agrees and line.theirs is not None
        verdict = "not told" if line.theirs is None else "agrees" if agrees else f"differs by {line.difference:+f}"
        theirs = "-" if line.theirs is None else f"{line.theirs:f}"
        text.append(f"{line.what:<50} ledger {line.ours:f}  other {theirs}  {verdict}")
    text.append(f"{apart} of {len(listed)} differ")
    return "\n".join(text)
