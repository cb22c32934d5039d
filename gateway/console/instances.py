"""The engines as the console shows them: state, load, how their cache is known, and how true predictions of it were."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.console.formats import NOTHING, count, share
from gateway.instance import Instance
from radix_index.base import Knowledge
from radix_index.predict import PredictionStats

KNOWN_BY = {
    Knowledge.COMPLETE: "events, complete",
    Knowledge.PARTIAL: "events, from the middle of its life on",
    Knowledge.STALE: "events, some are missing",
}
_BASIS = {"events": "events", "ids": "token ids", "text": "text, approximate"}


@dataclass(frozen=True, slots=True)
class ScoreView:
    """How predictions on one basis came out. Errors are tokens: predicted less reported."""

    basis: str
    answers: str
    exact: str
    mean_error: str
    mean_absolute_error: str


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One engine."""

    id: str
    url: str
    models: str
    state: str
    is_bad: bool
    running: str
    queued: str
    known_by: str
    is_degraded: bool
    capacity: str
    scores: tuple[ScoreView, ...]


def instance_row(instance: Instance) -> InstanceRow:
    """Return what the page shows of an engine at this moment."""
    facts, predicted, knowledge = instance.facts, instance.predicted, instance.knowledge
    state, is_bad = state_of(instance)
    if predicted is not None:
        known_by = "prediction, from what was routed there"
        capacity = f"{count(predicted.capacity_blocks * predicted.block_size)} learned"
    else:
        known_by = NOTHING if knowledge is None else KNOWN_BY[knowledge]
        capacity = NOTHING if facts is None or facts.capacity_tokens is None else count(facts.capacity_tokens)
    return InstanceRow(
        id=instance.id,
        url=instance.spec.url,
        models=", ".join(instance.models) or NOTHING,
        state=state,
        is_bad=is_bad,
        running=count(instance.load.running),
        queued=count(instance.load.queued_tokens),
        known_by=known_by,
        is_degraded=knowledge in (Knowledge.STALE, Knowledge.PARTIAL),
        capacity=capacity,
        scores=tuple(_score(basis, stats) for basis, stats in instance.scores.items() if stats.answers),
    )


def state_of(instance: Instance) -> tuple[str, bool]:
    """Return its state in words, and whether it is one to worry about."""
    is_draining = instance.is_healthy and instance.is_draining
    return "draining" if is_draining else instance.trouble or "up", not instance.is_healthy


def instance_data(instance: Instance) -> dict[str, object]:
    """Return the same for machines."""
    facts, knowledge, (state, _) = instance.facts, instance.knowledge, state_of(instance)
    return {
        "id": instance.id,
        "url": instance.spec.url,
        "models": list(instance.models),
        "state": state,
        "running": instance.load.running,
        "queued_tokens": instance.load.queued_tokens,
        "events": None if knowledge is None else knowledge.value,
        "capacity_tokens": facts.capacity_tokens if facts is not None else None,
    } | {
        f"{basis}_{name}": value
        for basis, stats in instance.scores.items()
        for name, value in (("answers", stats.answers), ("exact", stats.exact), ("error_tokens", stats.error_tokens))
    }


def _score(basis: str, stats: PredictionStats) -> ScoreView:
    return ScoreView(
        basis=_BASIS[basis],
        answers=count(stats.answers),
        exact=share(stats.exact, stats.answers),
        mean_error=f"{stats.mean_error_tokens:+.1f}".replace("-", "−") if stats.error_tokens else "0",
        mean_absolute_error=f"{stats.mean_absolute_error_tokens:.1f}" if stats.absolute_error_tokens else "0",
    )
