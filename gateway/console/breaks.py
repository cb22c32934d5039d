"""Lost hits as plain values: whose doing they were, the dearest breaks of each agent, and single cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.console.formats import NOTHING, Amount, count, duration, moment, money
from gateway.console.scale import Segment, percent
from gateway.console.step_views import ChangeView, change_view
from gateway.diagnosis.cards import BreakCard
from gateway.diagnosis.doctor import Ailment, ailments, by_party
from tracing.detail import Comparison, Party, StepDetail

MAX_AILMENTS: Final = 30
MAX_CARDS: Final = 30
_PARTIES: Final = {
    Party.CLIENT: ("client", "Changed by the client"),
    Party.TEMPLATE: ("template", "Written anew by the template"),
    Party.GATEWAY: ("gateway", "Lost by the service"),
    Party.NOBODY: ("nobody", "Short prompts, or unknown"),
}


@dataclass(frozen=True, slots=True)
class PartyRow:
    """One party's share of what was lost."""

    kind: str
    name: str
    breaks: str
    tokens: str
    money: tuple[Amount, ...]


@dataclass(frozen=True, slots=True)
class AilmentRow:
    """One kind of break at one place of one agent."""

    agent: str
    kind: str
    party_kind: str
    party: str
    place: str
    breaks: str
    runs: str
    tokens: str
    width: str
    money: tuple[Amount, ...]
    unpriced: int
    ttft: str
    repair: str


@dataclass(frozen=True, slots=True)
class CardView:
    """One loss of one step."""

    run_id: str | None
    tenant: str
    step: int | None
    request_id: str
    agent: str
    when: str
    kind: str
    party_kind: str
    party: str
    tokens: str
    money: Amount | None
    ttft: str
    is_estimated: bool
    change: ChangeView | None
    repair: str


@dataclass(frozen=True, slots=True)
class BreaksView:
    """Everything on the page."""

    steps: str
    breaks: str
    tokens: str
    money: tuple[Amount, ...]
    ttft: str
    parties: tuple[PartyRow, ...]
    bar: tuple[Segment, ...]
    ailments: tuple[AilmentRow, ...]
    cards: tuple[CardView, ...]


def breaks_view(cards: Sequence[BreakCard], steps: int) -> BreaksView:
    """Return what the page shows, the dearest first."""
    lost = sum(card.lost_tokens for card in cards)
    sums: dict[str, int] = {}
    for card in cards:
        if card.lost_nano is not None:
            sums[card.currency] = sums.get(card.currency, 0) + card.lost_nano
    told = by_party(cards)
    parties = [party for party in Party if party in told]
    bar, at = [], 0
    for party in parties:
        tokens = told[party][1]
        words = f"{_PARTIES[party][1]}: {count(tokens)} tokens"
        bar.append(Segment(f"by-{_PARTIES[party][0]}", percent(at, lost), percent(tokens, lost), words))
        at += tokens
    listed = ailments(cards)[:MAX_AILMENTS]
    most = max((each.lost_tokens for each in listed), default=0) or 1
    worst = sorted(cards, key=lambda card: (-(card.lost_nano or 0), -card.lost_tokens))[:MAX_CARDS]
    return BreaksView(
        steps=count(steps),
        breaks=count(len(cards)),
        tokens=count(lost),
        money=_amounts(sums),
        ttft=duration(sum(card.lost_ttft_ns or 0 for card in cards)),
        parties=tuple(
            PartyRow(*_PARTIES[party], count(told[party][0]), count(told[party][1]), _amounts(told[party][2]))
            for party in parties
        ),
        bar=tuple(bar),
        ailments=tuple(_ailment_row(each, most) for each in listed),
        cards=tuple(card_view(card) for card in worst),
    )


def card_view(card: BreakCard) -> CardView:
    """Return one card. Its words are those that the content policy kept."""
    change = None
    if card.change is not None:
        change = change_view(StepDetail(card.request_id, Comparison.CHANGED, change=card.change))
    kind, party = _PARTIES[card.party]
    return CardView(
        run_id=card.run_id,
        tenant=card.tenant,
        step=card.step,
        request_id=card.request_id,
        agent=card.agent or f"key {card.key_id}",
        when=moment(card.at_ns) + " UTC",
        kind=card.kind.value.replace("_", " "),
        party_kind=kind,
        party=party,
        tokens=count(card.lost_tokens),
        money=None if card.lost_nano is None else money(card.lost_nano, card.currency),
        ttft=duration(card.lost_ttft_ns),
        is_estimated=card.is_estimated,
        change=change,
        repair=card.repair,
    )


def break_data(cards: Sequence[BreakCard]) -> list[dict[str, object]]:
    """Return the cards for machines."""
    return [
        {
            "request_id": card.request_id,
            "tenant": card.tenant,
            "run_id": card.run_id or "",
            "step": card.step,
            "agent": card.agent or "",
            "model": card.model,
            "instance": card.instance or "",
            "kind": card.kind.value,
            "party": card.party.value,
            "path": "" if card.change is None else card.change.path,
            "start": None if card.change is None else card.change.start,
            "end": None if card.change is None else card.change.end,
            "lost_tokens": card.lost_tokens,
            "lost_nano": card.lost_nano,
            "currency": card.currency,
            "lost_ttft_ns": card.lost_ttft_ns,
            "estimated": card.is_estimated,
        }
        for card in cards
    ]


def _ailment_row(ailment: Ailment, most: int) -> AilmentRow:
    kind, party = _PARTIES[ailment.party]
    return AilmentRow(
        agent=ailment.agent,
        kind=ailment.kind.value.replace("_", " "),
        party_kind=kind,
        party=party,
        place=ailment.place or NOTHING,
        breaks=count(ailment.breaks),
        runs=count(len(ailment.runs)),
        tokens=count(ailment.lost_tokens),
        width=percent(ailment.lost_tokens, most),
        money=_amounts(ailment.lost_nano),
        unpriced=ailment.unpriced,
        ttft=duration(ailment.lost_ttft_ns) if ailment.lost_ttft_ns else NOTHING,
        repair="" if ailment.worst is None else ailment.worst.repair,
    )


def _amounts(sums: dict[str, int]) -> tuple[Amount, ...]:
    return tuple(money(nano, currency) for currency, nano in sorted(sums.items()))
