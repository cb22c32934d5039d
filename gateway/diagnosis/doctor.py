"""Break cards summed up: which agent loses most to what, the dearest first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from billing.reports import format_money
from billing.tables import counted, printable
from gateway.diagnosis.cards import BreakCard
from tracing.detail import BreakKind, Party

_INDEX = re.compile(r"\[\d+\]")


@dataclass(slots=True)
class Ailment:
    """One kind of break at one place of one agent's requests."""

    agent: str
    party: Party
    kind: BreakKind
    place: str  # the path, its message numbers left out
    breaks: int = 0
    runs: set[str] = field(default_factory=set)
    lost_tokens: int = 0
    lost_nano: dict[str, int] = field(default_factory=dict)  # by currency
    unpriced: int = 0
    lost_ttft_ns: int = 0
    worst: BreakCard | None = None

    def add(self, card: BreakCard) -> None:
        """Count one card in."""
        self.breaks += 1
        self.runs.add(card.run_id or card.request_id)
        self.lost_tokens += card.lost_tokens
        self.lost_ttft_ns += card.lost_ttft_ns or 0
        if card.lost_nano is None:
            self.unpriced += 1
        else:
            self.lost_nano[card.currency] = self.lost_nano.get(card.currency, 0) + card.lost_nano
        if self.worst is None or card.lost_tokens > self.worst.lost_tokens:
            self.worst = card


def agent_of(card: BreakCard) -> str:
    """Return what an agent is called: its label, else the key that it uses."""
    return card.agent or f"key {card.key_id}"


def ailments(cards: Iterable[BreakCard]) -> list[Ailment]:
    """Return what is wrong, what costs most first (by money, then by tokens)."""
    found: dict[tuple[str, BreakKind, str], Ailment] = {}
    for card in cards:
        place = "" if card.change is None else _INDEX.sub("[*]", card.change.path)
        key = (agent_of(card), card.kind, place)
        ailment = found.get(key)
        if ailment is None:
            ailment = found[key] = Ailment(key[0], card.party, card.kind, place)
        ailment.add(card)
    return sorted(found.values(), key=lambda a: (-max(a.lost_nano.values(), default=0), -a.lost_tokens, a.agent))


def by_party(cards: Iterable[BreakCard]) -> dict[Party, tuple[int, int, dict[str, int]]]:
    """Return of each party: breaks, lost tokens, money by currency."""
    found: dict[Party, tuple[int, int, dict[str, int]]] = {}
    for card in cards:
        breaks, tokens, money = found.get(card.party, (0, 0, {}))
        if card.lost_nano is not None:
            money = {**money, card.currency: money.get(card.currency, 0) + card.lost_nano}
        found[card.party] = (breaks + 1, tokens + card.lost_tokens, money)
    return found


def card_json(card: BreakCard) -> dict[str, object]:
    """Return a card as values that JSON holds."""
    return asdict(card)


def doctor_json(cards: Sequence[BreakCard], steps: int, *, limit: int) -> dict[str, object]:
    """Return everything as values that JSON holds."""
    return {
        "steps": steps,
        "breaks": len(cards),
        "lost_tokens": sum(card.lost_tokens for card in cards),
        "by_party": [
            {"party": party, "breaks": breaks, "lost_tokens": tokens, "lost_nano": money}
            for party, (breaks, tokens, money) in sorted(by_party(cards).items())
        ],
        "ailments": [
            {
                "agent": each.agent,
                "party": each.party,
                "kind": each.kind,
                "place": each.place,
                "breaks": each.breaks,
                "runs": len(each.runs),
                "lost_tokens": each.lost_tokens,
                "lost_nano": each.lost_nano,
                "unpriced": each.unpriced,
                "lost_ttft_ns": each.lost_ttft_ns,
                "worst": None if each.worst is None else card_json(each.worst),
            }
            for each in ailments(cards)[:limit]
        ],
        "cards": [card_json(card) for card in sorted(cards, key=lambda card: -card.lost_tokens)[:limit]],
    }


def render_doctor(cards: Sequence[BreakCard], steps: int, *, limit: int) -> str:
    """Return the findings as text, each with its worst case and what would mend it."""
    if not cards:
        return f"{counted(steps, 'step')}: no hit was lost that could have been one.\n"
    tokens = sum(card.lost_tokens for card in cards)
    lines = [f"{counted(steps, 'step')}, {counted(len(cards), 'break')}, {counted(tokens, 'token')} lost"]
    for party, (breaks, tokens, money) in sorted(by_party(cards).items(), key=lambda each: -each[1][1]):
        lines.append(f"  {_PARTIES[party]:<28}{counted(breaks, 'break'):>14} {tokens:>12,} tokens  {_money(money)}")
    for number, each in enumerate(ailments(cards)[:limit], 1):
        assert each.worst is not None
        where = f" at {printable(each.place)}" if each.place else ""
        lines += [
            "",
            f"{number}. {printable(each.agent)}: {each.kind.replace('_', ' ')}{where}",
            f"   {counted(each.breaks, 'break')} in {counted(len(each.runs), 'run')}: "
            f"{counted(each.lost_tokens, 'token')}, "
            f"{_money(each.lost_nano)}{f', {each.unpriced:,} unpriced' if each.unpriced else ''}"
            + (f", {each.lost_ttft_ns / 1e9:.2f} s of first-token time" if each.lost_ttft_ns else ""),
            *(f"   {line}" for line in card_lines(each.worst)),
        ]
    return "\n".join((*lines, "", _OTHER_FIGURES)) + "\n"


def card_lines(card: BreakCard) -> list[str]:
    """Return one card as a few lines of text."""
    step = f"run {printable(card.run_id)}, step {card.step}" if card.run_id is not None else card.request_id
    about = "about " if card.is_estimated else ""
    lines = [f"worst: {step}, {about}{card.lost_tokens:,} tokens"]
    change = card.change
    if change is not None:
        lines.append(f"{printable(change.path)}, characters {change.start} to {change.end}")
        if change.before is not None or change.after is not None:
            lines.append(f"  was {printable(change.before or '')!r}")
            lines.append(f"  is  {printable(change.after or '')!r}")
        if change.also:
            lines.append(f"also: {', '.join(map(printable, change.also))}")
    if card.repair:
        lines.append(f"→ {card.repair}")
    return lines


_OTHER_FIGURES = (
    "'keepwarm attribution', which credits follow, counts by tokens alone: docs/doctor.md says why they differ."
)

_PARTIES = {
    Party.CLIENT: "changed by the client",
    Party.TEMPLATE: "written anew by the template",
    Party.GATEWAY: "lost by the service",
    Party.NOBODY: "short prompts, or unknown",
}


def _money(amounts: dict[str, int]) -> str:
    return " + ".join(f"{format_money(nano)} {currency}" for currency, nano in sorted(amounts.items())) or "no price"
