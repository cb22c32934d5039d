"""Lost hits: prompt tokens that had been computed before and were computed again, with the cause and the money. Pure.

What could have been a hit is the longest prefix that anybody had computed by the time a request came. Of what is
missing to it, the causes are looked for in this order:

==================  ====================================================================================================
unknown             the engine tells nothing of its hits
below_minimum       the price says that prompts (or prefixes) this short are not cached
routing             another healthy instance had more of it than the chosen one, as the router saw both
restart             the instance that had it last is gone, was unhealthy, or began anew since
expiry              the price says how long a cached prefix lives, and it was not used for longer
eviction            the router knew that no instance has it any more, though the one that had it is still there
unknown             none of these: no decision was recorded, or the engine lacked what was expected of it
==================  ====================================================================================================

One more is no loss of a prefix that is there: *client_changed*, where a run's step changes what the step before it had
sent (a compacted history, an edited system prompt, tools in another order). It counts the tokens of the former prompt
that the new one, being as long, could have hit.

The money is what the tokens cost as fresh ones, less what a hit in the cheapest tier costs. What the price book credits
(``lost_hit_credits``) is a share of it.

All this follows from tokens. ``gateway.diagnosis.cards`` begins with these losses and then compares texts, so it counts
some of them otherwise: ``docs/doctor.md`` says which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from billing.allowances import period_of
from billing.attribution_prefixes import Found
from billing.credits import LOST_HITS, Grant, GrantKey
from billing.posting import place_of
from billing.prices import CacheTerms, PriceBook
from billing.rates import RATE_PER_NANO, RateCard
from billing.row import row_of
from tracing.record import Candidate, HitSource, RequestRecord, UsageSource

#: Prompts of steps that are kept to compare a run's next step with.
MAX_STEPS_KEPT = 20_000
_HIT_CLASSES = ("hit_device", "hit_host", "hit_disk", "hit_pool", "hit_unknown")


class Cause(StrEnum):
    """Why a hit was lost."""

    CLIENT_CHANGED = "client_changed"
    EVICTION = "eviction"
    ROUTING = "routing"
    RESTART = "restart"
    EXPIRY = "expiry"
    BELOW_MINIMUM = "below_minimum"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LostHit:
    """What one request lost to one cause. ``credit_nano``: what the book gives back of it."""

    record: RequestRecord
    cause: Cause
    tokens: int
    amount_nano: int
    credit_nano: int


class LostHits:
    """Finds the losses of records that come in order of arrival. ``restarts``: when instances began anew, in ns."""

    def __init__(self, restarts: Mapping[str, tuple[int, ...]]) -> None:
        self._restarts = restarts
        self._steps: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def of(
        self, record: RequestRecord, found: Found, book: PriceBook | None, card: RateCard | None
    ) -> Iterator[LostHit]:
        """Yield what a request lost; each token is in one loss at most. O(marks)."""
        before = self._former(record, found)
        if record.usage.source is not UsageSource.ENGINE:
            return
        terms = _terms(record, book)
        known = min(found.known_tokens, record.usage.prompt_tokens - 1)
        lost = known - record.usage.hit_tokens
        if found.stride_tokens and lost >= found.stride_tokens:
            for cause, tokens in self._causes(record, found, known, lost, terms):
                yield _priced(record, cause, tokens, book, card)
        if before is not None:
            same = next((n for n, (a, b) in enumerate(zip(before, found.marks, strict=False)) if a != b), None)
            if same is not None:
                could = min(len(before), len(found.marks)) * found.stride_tokens
                changed = could - max(same * found.stride_tokens, found.known_tokens, record.usage.hit_tokens)
                if changed >= found.stride_tokens:
                    yield _priced(record, Cause.CLIENT_CHANGED, changed, book, card)

    def _former(self, record: RequestRecord, found: Found) -> tuple[int, ...] | None:
        """Return the marks of the step before, and keep this one's."""
        if record.link is None or not found.marks:
            return None
        self._steps[record.request_id] = found.marks
        if len(self._steps) > MAX_STEPS_KEPT:
            self._steps.popitem(last=False)
        former = record.link.previous_request_id
        return None if former is None else self._steps.get(former)

    def _causes(
        self, record: RequestRecord, found: Found, known: int, lost: int, terms: CacheTerms
    ) -> Iterator[tuple[Cause, int]]:
        if record.usage.hit_source is HitSource.UNKNOWN:
            yield Cause.UNKNOWN, lost
            return
        if known < terms.minimum_tokens:
            yield Cause.BELOW_MINIMUM, lost
            return
        decision = record.decision
        candidates = {each.instance: each for each in decision.candidates} if decision is not None else {}
        chosen = candidates.get(decision.instance) if decision is not None else None  # not who went on, or decoded
        if chosen is not None:
            best = max((sum(each.hit_tokens) for each in candidates.values() if each.healthy), default=0)
            routed = min(lost, best - max(sum(chosen.hit_tokens), record.usage.hit_tokens))
            if routed > 0:
                yield Cause.ROUTING, routed
                lost -= routed
        if lost > 0:
            yield self._why_gone(record, found, known, candidates, terms), lost

    def _why_gone(
        self,
        record: RequestRecord,
        found: Found,
        known: int,
        candidates: Mapping[str, Candidate],
        terms: CacheTerms,
    ) -> Cause:
        arrived_ns, last = record.stamps.arrived_ns, candidates.get(found.instance or "")
        began = self._restarts.get(found.instance or "", ())
        if any(found.used_ns < at_ns <= arrived_ns for at_ns in began):
            return Cause.RESTART
        if candidates and found.instance is not None and (last is None or not last.healthy):
            return Cause.RESTART
        if terms.lifetime_s is not None and arrived_ns - found.used_ns > terms.lifetime_s * 10**9:
            return Cause.EXPIRY
        had = max((sum(each.hit_tokens) for each in candidates.values()), default=0)
        if record.decision is not None and record.decision.exact and had < known - found.stride_tokens:
            return Cause.EVICTION
        return Cause.UNKNOWN


def lost_hit_grants(losses: Iterable[LostHit]) -> dict[GrantKey, Grant]:
    """Return what the books give back, by month, cause and place. Pure."""
    found: dict[GrantKey, Grant] = {}
    for loss in losses:
        if loss.credit_nano:
            row = row_of(loss.record)
            month, end_ns = period_of(row.posted_ns, "month")
            grant = found.setdefault(
                GrantKey(LOST_HITS, f"{LOST_HITS} {loss.cause}", month, end_ns, place_of(row)), Grant()
            )
            grant.quantity += loss.tokens
            grant.amount_nano += loss.credit_nano
    return found


def _terms(record: RequestRecord, book: PriceBook | None) -> CacheTerms:
    basis = record.charge.basis
    if book is None or basis is None:
        return CacheTerms()
    return book.cache_terms(basis.model, basis.at_ns, basis.team, basis.region)


def price_of_loss(tokens: int, book: PriceBook | None, card: RateCard | None) -> int | None:
    """Return what tokens cost as fresh ones, less as hits in the cheapest tier, rounded once as the book says."""
    if book is None or card is None:
        return None
    fresh = card.rates["fresh"]
    hit = min((card.rates[name] for name in _HIT_CLASSES if name in card.rates), default=fresh)
    return book.rounding.divide(tokens * max(fresh - hit, 0), RATE_PER_NANO)


def _priced(record: RequestRecord, cause: Cause, tokens: int, book: PriceBook | None, card: RateCard | None) -> LostHit:
    amount = price_of_loss(tokens, book, card)
    if book is None or amount is None:
        return LostHit(record, cause, tokens, 0, 0)
    policy = book.file.lost_hit_credits
    credit = 0
    if policy is not None and cause in policy.causes:
        share = policy.share.as_integer_ratio()
        credit = book.rounding.divide(amount * share[0], share[1])
    return LostHit(record, cause, tokens, amount, credit)
