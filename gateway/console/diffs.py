"""Two steps of a run side by side: how much of their prompts is the same, and what else about them differs.

Prompts are compared by their marks, which say nothing of what was said; where they part is told to a mark. What a step
changed of the one before it is its diagnosis, whose words follow the content policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.console.formats import NOTHING, count, duration, share
from gateway.console.scale import Segment, percent, token_bar, token_counts
from gateway.console.step_views import ChangeView, change_view
from tracing.detail import StepDetail
from tracing.record import PrefixMarks, RequestRecord


@dataclass(frozen=True, slots=True)
class SideView:
    """One of the two steps. ``prompt``: the tokens that both begin with, then its own."""

    step: int
    request_id: str
    prompt: tuple[Segment, ...]
    bar: tuple[Segment, ...]
    tokens: str


@dataclass(frozen=True, slots=True)
class FactRow:
    """One fact of both steps."""

    name: str
    one: str
    other: str
    differs: bool


@dataclass(frozen=True, slots=True)
class DiffView:
    """Everything on the page."""

    one: SideView
    other: SideView
    common: str
    verdict: str
    facts: tuple[FactRow, ...]
    change: ChangeView | None


def common_tokens(one: PrefixMarks | None, other: PrefixMarks | None) -> int | None:
    """Return how many leading tokens two prompts share, to a mark; ``None`` where that is not known."""
    if one is None or other is None or one.stride_tokens != other.stride_tokens:
        return None
    same = 0
    for mine, theirs in zip(one.marks(), other.marks(), strict=False):
        if mine != theirs:
            break
        same += 1
    return same * one.stride_tokens


def diff_view(one: RequestRecord, other: RequestRecord, details: Mapping[str, StepDetail]) -> DiffView:
    """Return the two, ``other`` as what came of ``one``."""
    common = common_tokens(one.prefix, other.prefix)
    scale = max(one.usage.total_tokens, other.usage.total_tokens, 1)
    detail = details.get(other.request_id)
    change = None if detail is None or detail.previous_request_id != one.request_id else change_view(detail)
    return DiffView(
        one=_side(one, common, scale),
        other=_side(other, common, scale),
        common=NOTHING if common is None else count(common),
        verdict=_verdict(one, other, common),
        facts=_facts(one, other, details),
        change=change,
    )


def _side(record: RequestRecord, common: int | None, scale: int) -> SideView:
    prompt = record.usage.prompt_tokens
    same = min(common or 0, prompt)
    segments = []
    if same:
        segments.append(Segment("kept", "0%", percent(same, scale), f"{count(same)} tokens that both begin with"))
    if prompt > same:
        words = f"{count(prompt - same)} tokens of its own" if common is not None else f"{count(prompt)} prompt tokens"
        segments.append(Segment("own", percent(same, scale), percent(prompt - same, scale), words))
    return SideView(
        step=record.link.step if record.link else 1,
        request_id=record.request_id,
        prompt=tuple(segments),
        bar=token_bar(token_counts(record.usage), scale),
        tokens=count(prompt),
    )


def _verdict(one: RequestRecord, other: RequestRecord, common: int | None) -> str:
    if common is None:
        return "How far the prompts are the same is not known: the token ids of one of them were not."
    stride = one.prefix.stride_tokens if one.prefix is not None else 0
    mine = one.usage.prompt_tokens
    if mine - common <= stride:
        return f"The second prompt goes on where the first ended: {share(common, mine)} of it is the same."
    return f"They part after {count(common)} tokens (told to {count(stride)}): {share(common, mine)} of the first."


def _facts(one: RequestRecord, other: RequestRecord, details: Mapping[str, StepDetail]) -> tuple[FactRow, ...]:
    first = _told(one, details.get(one.request_id))
    second = _told(other, details.get(other.request_id))
    names = dict.fromkeys([*first, *second])
    return tuple(
        FactRow(name, first.get(name, NOTHING), second.get(name, NOTHING), first.get(name) != second.get(name))
        for name in names
    )


def _told(record: RequestRecord, detail: StepDetail | None) -> dict[str, str]:
    """What is known of one step, by the name that the page gives it."""
    usage = record.usage
    facts = {
        "Model": record.model,
        "Served as": record.served_model,
        "Instance": record.instance or NOTHING,
        "Prompt tokens": count(usage.prompt_tokens),
        "Hit tokens": count(usage.hit_tokens),
        "Output tokens": count(usage.output_tokens),
        "TTFT": duration(record.stamps.ttft_ns),
        "Ended by": record.finish_reason or record.outcome.value,
    }
    if detail is not None:
        made = detail.reproduction
        for name in ("weights_id", "engine", "template", "seed", "tools_digest", "system_digest", "prompt_digest"):
            value = getattr(made, name)
            facts[name.replace("_", " ").capitalize()] = NOTHING if value is None else str(value)
        facts |= {name: str(value) for name, value in sorted(made.sampling.items())}
    return facts
