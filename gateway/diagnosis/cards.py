"""Break cards: what each step lost, why, by whose doing, and what it came to. Pure.

Losses are measured against what could have hit, never against the hits of the step before: what anybody had computed
when the request came (``billing.attribution_lost``), and what the request says again although something in front of it
changed. A shortened or rewound history says nothing again, so it loses nothing. An answer that comes back in other
words or another spelling loses at most what was generated.

A kind is told only on evidence: a difference of the two requests' text, what the router saw, when engines began anew,
the price's terms. Where there is none the kind is *unknown*. Where prompts are not known as tokens, positions are
estimated from characters, and the card says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from billing.attribution import card_of
from billing.attribution_lost import Cause, LostHit, LostHits, price_of_loss
from billing.attribution_prefixes import Found, Prefixes
from billing.prices import PriceBook
from billing.rates import RateCard
from gateway.diagnosis.repairs import repair
from tracing.detail import BESIDE_THE_PROMPT, BreakKind, Comparison, Party, PromptChange, StepDetail, party_of
from tracing.record import HitSource, RequestRecord, UsageSource

LEAST_TOKENS: Final = 64
"""Losses below are within what blocks and marks leave open."""

_ESTIMATE_STRIDE: Final = 128
_ECHOES: Final = frozenset({BreakKind.ECHO_REASONING, BreakKind.ECHO_TOOL_JSON, BreakKind.ECHO_TEXT})
_EMPTIED: Final = frozenset({Cause.EVICTION, Cause.RESTART, Cause.UNKNOWN})
_ELSEWHERE: Final = frozenset({BreakKind.MODEL_CHANGED, BreakKind.TEMPLATE_CHANGED, BreakKind.NAMESPACE_CHANGED})

_CAUSES: Final = {
    Cause.ROUTING: BreakKind.ROUTED_ELSEWHERE,
    Cause.RESTART: BreakKind.RESTARTED,
    Cause.EXPIRY: BreakKind.EXPIRED,
    Cause.EVICTION: BreakKind.EVICTED,
    Cause.BELOW_MINIMUM: BreakKind.BELOW_MINIMUM,
    Cause.UNKNOWN: BreakKind.UNKNOWN,
    Cause.CLIENT_CHANGED: BreakKind.UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class BreakCard:
    """One loss of one step. Money is the lost tokens as fresh ones, less as hits in the cheapest tier."""

    request_id: str
    previous_request_id: str | None
    tenant: str
    key_id: str
    run_id: str | None
    step: int | None
    at_ns: int
    agent: str | None
    model: str
    instance: str | None
    kind: BreakKind
    party: Party
    lost_tokens: int
    lost_nano: int | None  # ``None``: no price
    currency: str
    lost_ttft_ns: int | None  # by this step's own rate of prefill; ``None``: not measured
    is_estimated: bool  # tokens follow from characters
    change: PromptChange | None
    repair: str


def diagnose(
    records: Iterable[RequestRecord],
    details: Mapping[str, StepDetail],
    books: Mapping[str, PriceBook],
    *,
    restarts: Mapping[str, tuple[int, ...]] | None = None,
) -> list[BreakCard]:
    """Return the cards of records that come in order of arrival. ``books``: all price versions, by their name;
    ``restarts``: when instances began anew. O(records · marks)."""
    prefixes, losses = Prefixes(), LostHits(restarts or {})
    former: dict[str, RequestRecord] = {}
    cards: list[BreakCard] = []
    for record in records:
        previous = former.get(record.link.previous_request_id or "") if record.link is not None else None
        detail, book = details.get(record.request_id), books.get(record.charge.price_version)
        price = card_of(record, book)
        found = prefixes.look_up(record)
        step = _Step(record, previous, detail, book, price)
        cards += step.cards(losses, found)
        prefixes.take(record, found, record.identity.tenant, shares_writes=False)
        former[record.request_id] = record
    return cards


@dataclass(frozen=True, slots=True)
class _Step:
    """One record, and what is known of it."""

    record: RequestRecord
    previous: RequestRecord | None
    detail: StepDetail | None
    book: PriceBook | None
    price: RateCard | None

    @property
    def change(self) -> PromptChange | None:
        return self.detail.change if self.detail is not None else None

    def cards(self, losses: LostHits, found: Found) -> Iterator[BreakCard]:
        is_estimated = not found.marks or not self._counts_alike()
        known = self._estimate() if is_estimated else found
        lost = list(losses.of(self.record, known, self.book, self.price))
        if self.record.usage.source is not UsageSource.ENGINE:
            return
        explained = False
        for loss in lost:
            kind, tokens = self._kind(loss, known), loss.tokens
            if loss.cause is Cause.CLIENT_CHANGED:
                tokens = self._again(loss)
            if tokens >= LEAST_TOKENS:
                explained = explained or loss.cause is Cause.CLIENT_CHANGED
                yield self._told(kind, tokens, is_estimated=is_estimated)
        if is_estimated and (tokens := self._changed_by_estimate()) >= LEAST_TOKENS:
            assert self.change is not None
            yield self._told(self.change.kind, tokens, is_estimated=True)
        elif not explained and (echo := self._echo()) is not None:
            yield self._told(echo[0], echo[1], is_estimated=False)

    def _counts_alike(self) -> bool:
        """Tell whether the engine counts as we do, so that our places in the prompt are its places."""
        ours, theirs = self.record.gateway_prompt_tokens, self.record.usage.prompt_tokens
        return ours is None or abs(ours - theirs) <= max(LEAST_TOKENS, theirs // 20)

    def _kind(self, loss: LostHit, known: Found) -> BreakKind:
        change, comparison = self.change, self.detail.comparison if self.detail is not None else None
        if loss.cause is Cause.CLIENT_CHANGED:
            if change is not None and change.kind not in _ECHOES:
                return change.kind
            return self._behind_the_text(comparison)
        if loss.cause in _EMPTIED and self._is_served_otherwise():
            return BreakKind.TEMPLATE_CHANGED
        if loss.cause in (Cause.UNKNOWN, Cause.EVICTION) and change is not None and self._moves_all(change.kind):
            return change.kind
        if loss.cause is Cause.UNKNOWN and change is not None and self._ends_at(change):
            return change.kind
        return _CAUSES[loss.cause]

    def _is_served_otherwise(self) -> bool:
        """Tell whether the instance of the step before has other weights since: then nothing that it held is right."""
        before, differs = self.previous, self.detail.differs if self.detail is not None else ()
        return before is not None and before.instance == self.record.instance and "weights_id" in differs

    def _ends_at(self, change: PromptChange) -> bool:
        """Tell whether the hits end about where something is spelled otherwise: then that prompt shows it."""
        if change.kind is not BreakKind.SPELLING:
            return False
        prompt, hits = self.record.usage.prompt_tokens, self.record.usage.hit_tokens
        place = prompt * change.kept_chars // max(change.total_chars, 1)
        return abs(hits - place) <= max(LEAST_TOKENS, prompt // 20)

    def _moves_all(self, kind: BreakKind) -> bool:
        """Tell whether a change of this kind leads an engine to another cache, though the tokens stay the same."""
        if kind is BreakKind.CACHE_CONTROL:  # where it is known to go by markers
            before = 0 if self.previous is None else self.previous.usage.written_tokens
            return before + self.record.usage.written_tokens > 0
        return kind in _ELSEWHERE

    def _behind_the_text(self, comparison: Comparison | None) -> BreakKind:
        """Return the kind where the prompt's tokens differ and the requests' text does not."""
        if self.detail is None or comparison not in (Comparison.APPENDED, Comparison.UNSEEN):
            return BreakKind.UNKNOWN
        if {"template", "weights_id", "model"} & set(self.detail.differs):
            return BreakKind.TEMPLATE_CHANGED
        if comparison is Comparison.UNSEEN:  # that the messages are the same is not known
            return BreakKind.UNKNOWN
        note = self.record.prompt
        return BreakKind.ECHO_TEMPLATE if note is not None and note.echo == "template_rewrites" else BreakKind.UNKNOWN

    def _again(self, loss: LostHit) -> int:
        """Return how many of the tokens behind a change were said before: what could have hit."""
        change, detail = self.change, self.detail
        if detail is not None and detail.comparison is Comparison.SHORTENED:
            return 0
        if change is None:
            return loss.tokens
        behind = max(change.total_chars - change.kept_chars, 1)
        share = self.record.usage.prompt_tokens * min(change.repeated_chars, behind) // max(change.total_chars, 1)
        return min(loss.tokens, share) if change.repeated_chars < behind * 3 // 4 else loss.tokens

    def _estimate(self) -> Found:
        """Return what was known of a prompt whose tokens are not, from the step before and from characters."""
        before = self.previous
        if before is None or self.detail is None or before.usage.source is not UsageSource.ENGINE:
            return Found()
        known = before.usage.prompt_tokens
        if self.detail.comparison not in (Comparison.APPENDED, Comparison.CHANGED):
            return Found()
        change = self.change
        if change is not None and change.kind not in _ECHOES | BESIDE_THE_PROMPT:
            known = min(known, self.record.usage.prompt_tokens * change.kept_chars // change.total_chars)
        known = min(known, self.record.usage.prompt_tokens)
        return Found((), _ESTIMATE_STRIDE, known, before.instance, before.stamps.closed_ns)

    def _changed_by_estimate(self) -> int:
        change, usage = self.change, self.record.usage
        if change is None or change.kind in _ECHOES | BESIDE_THE_PROMPT or usage.hit_source is HitSource.UNKNOWN:
            return 0
        kept = usage.prompt_tokens * change.kept_chars // change.total_chars
        again = usage.prompt_tokens * change.repeated_chars // change.total_chars
        could = min(kept + again, usage.prompt_tokens - 1)
        return could - max(kept, usage.hit_tokens)

    def _echo(self) -> tuple[BreakKind, int] | None:
        """Return what was lost of the former answer's own tokens, and why."""
        before, usage, note = self.previous, self.record.usage, self.record.prompt
        if before is None or usage.hit_source is HitSource.UNKNOWN or before.usage.source is not UsageSource.ENGINE:
            return None
        change = self.change
        if change is not None and change.kind in _ECHOES:
            kind = change.kind
        elif note is not None and note.echo == "template_rewrites":
            kind = BreakKind.ECHO_TEMPLATE
        else:
            return None
        could = min(before.usage.prompt_tokens + before.usage.output_tokens, usage.prompt_tokens - 1)
        lost = could - max(usage.hit_tokens, before.usage.prompt_tokens)
        if note is not None and note.echo_lost_tokens:
            lost = min(lost, note.echo_lost_tokens)  # what follows the quotation is new
        return (kind, lost) if lost >= LEAST_TOKENS else None

    def _told(self, kind: BreakKind, tokens: int, *, is_estimated: bool) -> BreakCard:
        record, link = self.record, self.record.link
        change = self.change if self.change is not None and self.change.kind is kind else None
        party = party_of(kind)
        if kind is BreakKind.TEMPLATE_CHANGED and change is not None:
            party = Party.CLIENT  # it names another one itself
        return BreakCard(
            request_id=record.request_id,
            previous_request_id=link.previous_request_id if link is not None else None,
            tenant=record.identity.tenant,
            key_id=record.identity.key_id,
            run_id=link.run_id if link is not None else None,
            step=link.step if link is not None else None,
            at_ns=record.stamps.arrived_ns,
            agent=record.labels.get("agent"),
            model=record.served_model or record.model,
            instance=record.instance,
            kind=kind,
            party=party,
            lost_tokens=tokens,
            lost_nano=price_of_loss(tokens, self.book, self.price),
            currency=record.charge.currency,
            lost_ttft_ns=_lost_time(record, tokens),
            is_estimated=is_estimated,
            change=change,
            repair=repair(kind, change),
        )


def without_words(card: BreakCard) -> BreakCard:
    """Return the card without excerpts."""
    return card if card.change is None else replace(card, change=replace(card.change, before=None, after=None))


def _lost_time(record: RequestRecord, tokens: int) -> int | None:
    """Return how long computing the lost tokens took, as a share of what computing the step's prompt took."""
    stamps, usage = record.stamps, record.usage
    computed = usage.prompt_tokens - usage.hit_tokens
    if stamps.first_token_ns is None or stamps.sent_ns is None or computed <= 0:
        return None
    return (stamps.first_token_ns - stamps.sent_ns) * min(tokens, computed) // computed
