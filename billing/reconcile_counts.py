"""The gateway's own counts beside the engines': where they differ, and what was clamped or contradicted itself. Pure.

The engine's count is what is billed; the gateway's stands beside it in the row. A difference is a line for whoever
answers for the books, by instance and model, since it comes of a template or a tokenizer that is not the engine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from billing.reports import format_money
from billing.row import LedgerRow
from billing.tables import aligned, printable
from tracing.record import UsageSource

MAX_EXAMPLES = 5


@dataclass(slots=True)
class CountSums:
    """One instance and model. ``compared`` rows have both counts; ``alarms``: by the code of a usage problem."""

    requests: int = 0
    compared: int = 0
    differ: int = 0
    gateway_tokens: int = 0
    engine_tokens: int = 0
    recovered: int = 0
    missing: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    amount_nano: int = 0  # of the rows that differ or have an alarm
    examples: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether there is nothing to look at."""
        return not (self.differ or self.alarms or self.missing)


def compare_counts(rows: Iterable[LedgerRow]) -> dict[tuple[str, str], CountSums]:
    """Sum rows by (instance, model). Cost: some 2 µs a row."""
    found: dict[tuple[str, str], CountSums] = {}
    for row in rows:
        if row.revision or row.usage_source == UsageSource.NONE.value:
            continue
        sums = found.setdefault((row.instance or "-", row.served_model), CountSums())
        sums.requests += 1
        sums.recovered += row.usage_source == UsageSource.RECOVERED.value
        sums.missing += row.usage_source == UsageSource.MISSING.value
        problems = msgspec.json.decode(row.usage_problems, type=list[str])
        sums.alarms.update(problem.partition(":")[0] for problem in problems)
        differs = False
        if row.gateway_prompt_tokens is not None and row.usage_source == UsageSource.ENGINE.value:
            sums.compared += 1
            sums.gateway_tokens += row.gateway_prompt_tokens
            sums.engine_tokens += row.prompt_tokens
            differs = row.gateway_prompt_tokens != row.prompt_tokens
            sums.differ += differs
        if differs or problems:
            sums.amount_nano += row.amount_nano or 0
            if len(sums.examples) < MAX_EXAMPLES:
                sums.examples.append(row.request_id)
    return found


def render_counts(found: dict[tuple[str, str], CountSums]) -> str:
    """Return an aligned table, then the alarms and some requests of what does not agree."""
    head = [
        "instance",
        "model",
        "requests",
        "compared",
        "differ",
        "gateway",
        "engine",
        "recovered",
        "missing",
        "alarms",
    ]
    lines = [head]
    text = []
    for (instance, model), sums in sorted(found.items()):
        counts = (sums.requests, sums.compared, sums.differ, sums.gateway_tokens, sums.engine_tokens, sums.recovered)
        numbers = [f"{number:,}" for number in (*counts, sums.missing, sums.alarms.total())]
        lines.append([printable(instance), printable(model), *numbers])
        if not sums.agrees:
            alarms = ", ".join(f"{code} {count}" for code, count in sorted(sums.alarms.items()))
            text.append(
                f"{printable(instance)} {printable(model)}: {format_money(sums.amount_nano)} in rows to look at"
                f"{f'; {alarms}' if alarms else ''}; such as {', '.join(sums.examples) or 'those without counts'}"
            )
    return "\n".join([aligned(lines, 2).rstrip(), *text]) + "\n"
