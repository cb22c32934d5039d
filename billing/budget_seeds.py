"""What the ledger says of the windows that are open now: for a budget store that knows nothing yet."""

from __future__ import annotations

from collections.abc import Sequence

from billing.budgets import Budget, Seed, Spender, Unit
from billing.ledger_read import LedgerReader, RowFilter
from billing.reports import Sums

_DIMENSIONS = ("tenant", "team", "key", "served_model", "usage_source")


def budget_seeds(budgets: Sequence[Budget], reader: LedgerReader, now_ns: int) -> list[Seed]:
    """Return what was used of each budget in its current window. Raises ``LedgerError``.

    A request that nothing was computed for counts as no call.
    """
    seeds: dict[tuple[str, int], Seed] = {}
    for budget in budgets:
        start_ns, end_ns = budget.window.around(now_ns)
        for group in reader.report(_DIMENSIONS, RowFilter(since_ns=start_ns, until_ns=end_ns)).groups:
            tenant, team, key, model, source = group.key
            who = Spender(tenant, team, key, model)
            if source == "none" or not budget.holds_for(who):
                continue
            used = _used(budget, group.sums, group.currency)
            place = (budget.counter(who), start_ns)
            before = seeds[place].used if place in seeds else 0
            seeds[place] = Seed(budget.counter(who), start_ns, end_ns, before + used)
    return list(seeds.values())


def _used(budget: Budget, sums: Sums, currency: str) -> int:
    match budget.unit:
        case Unit.CALLS:
            return sums.requests
        case Unit.TOKENS:
            return sums.prompt_tokens + sums.output_tokens
        case Unit.MONEY:
            return sums.amount_nano if currency == budget.currency else 0
