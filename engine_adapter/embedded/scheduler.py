"""Who computes how many tokens in the next step.

Continuous batching: every step serves every decoding sequence, then spends what is left of its token budget on prompts.
So a long prompt never stops the streams that run beside it; it only makes their steps longer, by a bounded amount. Of
the prompts' budget half goes to the oldest, half to the shortest first: a warm prompt with few new tokens overtakes a
cold one, and the cold one still moves.

Pages for a whole prompt are taken when it is admitted, pages for output as it grows (by one token, or by the several
that a grammar left no choice about, which are then computed as a prompt is). When there are none, the youngest
sequence gives back its pages and waits at the front of the queue; it keeps its output and computes again what is lost.
"""

from __future__ import annotations

from bisect import insort
from concurrent.futures import wait
from dataclasses import dataclass, field

from engine_adapter.embedded.cache import Admission, PageCache
from engine_adapter.embedded.pace import Pace, PaceOptions
from engine_adapter.embedded.sequence import Sequence

_STRETCH = 4  # a prompt's last tokens, up to a fourth of the budget, join a step that is full: another one costs more


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The limits of a step, which a prompt that ends in it may stretch by a fourth."""

    max_running: int
    step_tokens: int  # tokens of a step in which nobody decodes
    pace: PaceOptions  # prompt tokens of a step in which somebody does: what a stream may wait for


@dataclass(slots=True)
class Step:
    """One step's work: ``chunks`` are (sequence, tokens to compute), those that decode first; ``admitted`` have not
    been told of it yet."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    decoding: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts among those to compute."""
        return sum(tokens for _, tokens in self.chunks[self.decoding :])


class Scheduler:
    """The queue and the batch. Pure but for the page cache; used from the engine's thread alone."""

    def __init__(self, cache: PageCache, options: SchedulerOptions) -> None:
        self.cache, self.options, self.pace = cache, options, Pace(options.pace)
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by rank; those with ``loading`` hold pages but do not compute yet
        self.leaving: list[Sequence] = []  # ended while loading: their pages are not free before the store lets go
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its rank."""
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and release its pages (as soon as the store has stopped writing)."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if sequence.loading is not None and not sequence.loading.cancel() and not sequence.loading.done():
            self.leaving.append(sequence)
            return
        sequence.loading = None
        self.cache.release(sequence)

    def drain(self) -> None:
        """Wait until the store has stopped writing for those that left; then every page is released."""
        wait([sequence.loading for sequence in self.leaving if sequence.loading is not None])
        self._collect_loaded()

    def schedule(self) -> Step:
        """Decide the next step. Pages for everything in it are there when this returns."""
        step = Step()
        self._collect_loaded()
        self._admit()
        ready = [sequence for sequence in self.running if sequence.loading is None]
        step.admitted = [sequence for sequence in ready if not sequence.announced]
        self._make_room(ready)
        ready = [sequence for sequence in ready if sequence in self.running]
        step.chunks += [(sequence, 1) for sequence in ready if sequence.remaining == 1]
        step.decoding = len(step.chunks)
        self._schedule_prefills([sequence for sequence in ready if sequence.remaining > 1], step)
        return step

    def _collect_loaded(self) -> None:
        for sequence in self.running:
            if sequence.loading is not None and sequence.loading.done():
                self.cache.loaded(sequence)
        for sequence in [s for s in self.leaving if s.loading is not None and s.loading.done()]:
            self.leaving.remove(sequence)
            sequence.loading = None
            self.cache.release(sequence)

    def _admit(self) -> None:
        """Move sequences from the queue into the batch. Nobody overtakes one that waits for room."""
        for sequence in list(self.waiting):
            if len(self.running) >= self.options.max_running:
                return
            admission = self.cache.admit(sequence, reserve=len(self.running))
            if admission is Admission.NO_ROOM:
                return
            if admission is Admission.READY:
                self.waiting.remove(sequence)
                insort(self.running, sequence, key=lambda s: s.rank)

    def _make_room(self, ready: list[Sequence]) -> None:
        """Take pages for the output that has come since the last step; the youngest give theirs when there are none."""
        for sequence in ready:
            while sequence in self.running and not self.cache.extend(sequence):
                self._preempt([s for s in self.running if s.loading is None][-1])

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self.cache.release(victim)
        self.add(victim)

    def _schedule_prefills(self, prefills: list[Sequence], step: Step) -> None:
        if not prefills:
            return
        budget = self.pace.mixed_tokens() if step.chunks else self.options.step_tokens
        stretch = budget // _STRETCH
        oldest, *others = prefills
        shares = {oldest: min(oldest.remaining, budget if not others else -(-budget // 2))}
        budget -= shares[oldest]
        for sequence in sorted(others, key=lambda s: s.remaining):
            shares[sequence] = min(sequence.remaining, budget)
            budget -= shares[sequence]
        rest = oldest.remaining - shares[oldest]
        shares[oldest] += rest if rest <= budget + stretch else budget
        step.chunks += [(sequence, tokens) for sequence, tokens in shares.items() if tokens]
