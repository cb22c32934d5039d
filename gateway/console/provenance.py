"""Who computed what a step hit: the tokens of a run by the step that computed them last.

A step computes its prompt from where its hits end, and its answer; whatever stood there before, in the conversation
that the run carries on, is its own from then on. What was hit before any step of the run computed it came from
elsewhere. That follows from lengths alone, so it is told as far as lengths tell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tracing.store_outline import StepOutline

MAX_CONVERSATIONS = 16
"""Open ones of a run; the one that rested longest goes for a new one."""


@dataclass(frozen=True, slots=True)
class Writers:
    """Who computed a stretch of a prompt. ``oldest`` and ``newest`` are steps; ``None``: not of this run."""

    oldest: int | None
    newest: int | None
    count: int
    oldest_ns: int | None
    newest_ns: int | None


class Provenance:
    """One conversation as a stack: where each stretch begins, and the step that computed it. O(1) a step, amortized."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # of the last step
        self._starts: list[int] = []
        self._steps: list[tuple[int, int]] = []  # step, its arrival

    def add(self, step: StepOutline) -> None:
        """A step computed everything behind its hits."""
        self.prompt_tokens = step.prompt_tokens
        hits = sum(step.hit_tokens)
        while self._starts and self._starts[-1] >= hits:
            self._starts.pop()
            self._steps.pop()
        self._starts.append(hits)
        self._steps.append((step.step, step.arrived_ns))

    def of(self, start: int, end: int) -> Writers:
        """Who computed the tokens from ``start`` to ``end`` (exclusive), as things stand. O(log steps)."""
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, max(end - 1, start)) - 1
        oldest = None if first < 0 else self._steps[first]
        newest = None if last < 0 else self._steps[last]
        return Writers(
            oldest[0] if oldest else None,
            newest[0] if newest else None,
            last - max(first, 0) + 1,
            oldest[1] if oldest else None,
            newest[1] if newest else None,
        )


class Conversations:
    """A run's conversations: the main one and what was asked beside it (titles, summaries, sub-agents)."""

    def __init__(self) -> None:
        self._open: list[Provenance] = []

    def of(self, step: StepOutline) -> Provenance:
        """The one that a step goes on with: whose last prompt is the longest that its own may begin with."""
        fitting = [each for each in self._open if each.prompt_tokens <= step.prompt_tokens]
        return max(fitting, key=lambda each: each.prompt_tokens, default=None) or Provenance()

    def add(self, step: StepOutline) -> None:
        """A step came; one that was never answered computed nothing that is known of."""
        if step.ttft_ns is None and step.outcome != "ok":
            return
        conversation = self.of(step)
        if conversation in self._open:
            self._open.remove(conversation)
        self._open = [*self._open[1 - MAX_CONVERSATIONS :], conversation]
        conversation.add(step)


def writers_of(steps: Sequence[StepOutline], wanted: Iterable[str]) -> dict[str, list[Writers | None]]:
    """For each wanted request, who computed its hits of each tier; ``None`` for a tier without hits. O(steps)."""
    names, conversations = set(wanted), Conversations()
    found: dict[str, list[Writers | None]] = {}
    for step in steps:
        if step.request_id in names:
            conversation = conversations.of(step)
            at, by_tier = 0, list[Writers | None]()
            for tokens in step.hit_tokens:
                by_tier.append(conversation.of(at, at + tokens) if tokens else None)
                at += tokens
            found[step.request_id] = by_tier
            if len(found) == len(names):
                break
        conversations.add(step)
    return found
