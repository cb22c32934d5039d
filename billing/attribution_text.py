"""An attribution as tables for people and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from billing.attribution import Attribution
from billing.reports import format_money
from billing.tables import aligned, counted, printable


def render_attribution(found: Attribution) -> str:
    """Return the tables: units, flows, lost hits, waste, prefixes."""
    parts = [f"{counted(found.requests, 'request')}, {found.unmarked:,} of them with prompts that are not known"]
    for title, head, left, lines in _tables(found):
        parts.append(f"\n{title}\n{aligned([head, *lines], left)}" if lines else f"\n{title}: none\n")
    return "\n".join(parts)


def attribution_json(found: Attribution) -> dict[str, object]:
    """Return everything as values that JSON holds."""
    return {
        "unit": found.unit,
        "requests": found.requests,
        "unmarked": found.unmarked,
        "unpriced": found.unpriced,
        "units": [{"unit": name, "currency": cur, **asdict(sums)} for (name, cur), sums in sorted(found.units.items())],
        "flows": [
            {"writer": writer, "reader": reader, "currency": cur, **asdict(flow)}
            for (writer, reader, cur), flow in sorted(found.flows.items())
        ],
        "lost": [
            {
                "cause": cause.value,
                "currency": cur,
                "requests": n,
                "tokens": tokens,
                "amount_nano": amount,
                "credit_nano": credit,
            }
            for (cause, cur), (n, tokens, amount, credit) in sorted(found.lost_by_cause().items())
        ],
        "waste": [
            {"kind": kind.value, "currency": cur, "requests": n, "tokens": tokens, "amount_nano": amount}
            for (kind, cur), (n, tokens, amount) in sorted(found.waste_by_kind().items())
        ],
        "prefixes": [asdict(prefix) for prefix in found.prefixes],
    }


_Table = tuple[str, Sequence[str], int, list[list[str]]]


def _tables(found: Attribution) -> Iterable[_Table]:
    unit = found.unit
    head = [unit, "requests", "prompt", "hit", "own", "of others", "given", "cost", "saved", "GPU s", "transfer"]
    head += ["lost", "credit", "wasted", "currency"]
    yield (
        f"By {unit}",
        head,
        1,
        [
            [
                printable(name),
                *_counts(s.requests, s.prompt_tokens, s.hit_tokens),
                *_counts(s.own_hit_tokens, s.others_hit_tokens, s.given_tokens),
                *_money(s.cost_nano, s.saved_nano),
                f"{s.saved_gpu_ns / 1e9:.3f}",
                *_money(s.transfer_nano, s.lost_nano, s.credit_nano, s.wasted_nano),
                currency,
            ]
            for (name, currency), s in sorted(found.units.items(), key=lambda each: -each[1].cost_nano)
        ],
    )
    yield (
        "Who computed what others read",
        ["computed by", "read by", "tokens", "saved", "transfer", "currency"],
        2,
        [
            [printable(w), printable(r), *_counts(f.tokens), *_money(f.saved_nano, f.transfer_nano), currency]
            for (w, r, currency), f in sorted(found.flows.items(), key=lambda each: -each[1].tokens)
        ],
    )
    yield (
        "Lost hits, by tokens alone ('keepwarm doctor' compares texts as well: docs/doctor.md says why figures differ)",
        ["cause", "requests", "tokens", "lost", "credit", "currency"],
        1,
        [
            [cause.value, *_counts(n, tokens), *_money(amount, credit), currency]
            for (cause, currency), (n, tokens, amount, credit) in sorted(found.lost_by_cause().items())
        ],
    )
    yield (
        "Waste",
        ["kind", "requests", "tokens", "wasted", "currency"],
        1,
        [
            [kind.value, *_counts(n, tokens), *_money(amount), currency]
            for (kind, currency), (n, tokens, amount) in sorted(found.waste_by_kind().items())
        ],
    )
    yield (
        "Prefixes that saved most",
        ["prefix", "computed by", "read by", "length", "reads", "tokens read", "saved", "currency"],
        3,
        [
            [p.name, printable(p.writer), printable(", ".join(p.readers))[:60],
             *_counts(p.tokens, p.reads, p.read_tokens), *_money(p.saved_nano), p.currency]
            for p in found.prefixes[:20]
        ],
    )  # fmt: skip


def _counts(*numbers: int) -> list[str]:
    return [f"{number:,}" for number in numbers]


def _money(*amounts: int) -> list[str]:
    return [format_money(amount) for amount in amounts]
