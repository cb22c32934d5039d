"""Limits and budgets at the door: the most that a request may come to is taken before an engine sees it, and settled
after."""

from __future__ import annotations

import time

from msgspec.structs import replace

from billing.budgets import Budgets, Estimate, Spender
from billing.errors import BudgetExceeded
from billing.meter import charge
from billing.shelf import PriceShelf
from gateway.dispatch import BYTES_PER_TOKEN
from gateway.draft import Draft
from gateway.errors import OverBudget
from gateway.identity import Caller
from gateway.limits.limiter import Limited, Limiter
from gateway.protocols.base import Ask
from tracing.record import Charge, RequestRecord, Usage, UsageSource

_LIMIT_MEMBERS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_CHOICES = ("n", "best_of")
MOST_OUTPUT_TOKENS = 1 << 32
"""Whatever a client writes, sums of reservations stay integers that every store can hold."""


class Spending:
    """What the pipeline asks. ``assumed_output_tokens`` is reserved where a request names no limit of its own."""

    def __init__(self, budgets: Budgets, shelf: PriceShelf, assumed_output_tokens: int, limiter: Limiter) -> None:
        self._budgets, self._shelf, self._assumed, self._limiter = budgets, shelf, assumed_output_tokens, limiter
        self.limits = limiter.status

    def holds_for(self, caller: Caller) -> bool:
        """Tell whether anything is limited for this caller; where not, a request need not come here at all."""
        return bool(caller.limits or caller.budgets or self._budgets.are_there)

    async def admit(self, draft: Draft, ask: Ask, caller: Caller) -> None:
        """Take of the caller's limits and reserve in its budgets; the draft carries both.

        Raises ``OverLimit`` and ``OverBudget``.
        """
        prompt = draft.prompt_tokens if draft.prompt_tokens is not None else len(ask.body) // BYTES_PER_TOKEN
        output = self._output_tokens(ask)
        if caller.limits:
            try:
                draft.passage = await self._limiter.enter(caller.limits, prompt + output)
            except Limited as error:
                draft.limits = error.found
                raise
            draft.limits = tuple(draft.passage.taken)
        if caller.budgets or self._budgets.are_there:
            await self._reserve(draft, prompt, output, caller)

    async def _reserve(self, draft: Draft, prompt: int, output: int, caller: Caller) -> None:
        identity = caller.identity
        who = Spender(identity.tenant, identity.team, identity.key_id, draft.served_model)
        cost = self._most(draft, prompt, output)
        estimate = Estimate(prompt + output, cost.amount_nano, cost.currency)
        try:
            draft.ticket = await self._budgets.admit(who, estimate, draft.arrived_ns, caller.budgets)
        except BudgetExceeded as error:
            wait_s = max((error.until_ns - time.time_ns()) // 10**9, 1)
            raise OverBudget(f"budget {error.budget!r}: {error.why}", retry_after_s=wait_s) from None

    def _most(self, draft: Draft, prompt: int, output: int) -> Charge:
        """Return the dearest bill that there can be: no hits, and all of the prompt written to the dearest cache."""
        book, model, team = self._shelf.book_for(draft.served_model), draft.served_model, draft.identity.team
        answered = Usage(output_tokens=output, source=UsageSource.RECOVERED)
        bills = [
            charge(usage, book, model, draft.arrived_ns, team=team)
            for usage in (
                replace(answered, fresh_tokens=prompt),
                replace(answered, write_tokens=prompt),
                replace(answered, write_5m_tokens=prompt),
                replace(answered, write_1h_tokens=prompt),
            )
        ]
        if bills[0].amount_nano is None:
            return bills[0]
        return max(bills, key=lambda bill: bill.amount_nano or 0)  # a class without a price cannot be billed

    def settle(self, draft: Draft, record: RequestRecord) -> None:
        """Hand over what the request came to. Nothing computed: all is given back, budgets' calls as well. Not counted:
        the tokens that were taken stand."""
        usage, cost = record.usage, record.charge
        nothing = usage.source is UsageSource.NONE
        tokens = None if usage.source is UsageSource.MISSING else usage.total_tokens
        if draft.passage is not None:
            draft.passage.settle(tokens)
        if not draft.ticket.holds:
            return
        came_to = Estimate(tokens, cost.amount_nano, cost.currency, calls=0 if nothing else 1)
        self._budgets.settle_soon(draft.ticket, came_to)

    def _output_tokens(self, ask: Ask) -> int:
        if not ask.generates:
            return 0
        values = ask.form.values
        named = [limit for name in _LIMIT_MEMBERS if (limit := _positive(values.get(name))) is not None]
        each = max(named) if named else self._assumed  # engines differ in which one they follow
        return min(each * _answers(ask), MOST_OUTPUT_TOKENS)


def _answers(ask: Ask) -> int:
    """Return how many answers an engine may generate: the choices asked for, to each of a completion's prompts."""
    values = ask.form.values
    choices = [count for name in _CHOICES if (count := _positive(values.get(name))) is not None]
    prompts = values.get("prompt") if ask.endpoint == "completions" else None
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return max(choices, default=1) * several


def _positive(value: object) -> int | None:
    """Return a positive number as engines read it: 100.0 is one of theirs."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return None
    return int(min(value, MOST_OUTPUT_TOKENS))
