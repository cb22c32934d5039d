"""The embedded engine: one thread that admits, computes a step, samples, and tells.

Any thread submits and aborts; everything else happens on the engine's thread, so nothing below it needs a lock. A
request that fails (its constraint raises, its sink raises) ends alone.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass, replace
from time import monotonic

import torch

from engine_adapter.embedded.attention import Span
from engine_adapter.embedded.cache import PageCache
from engine_adapter.embedded.errors import ConstraintError, RequestError
from engine_adapter.embedded.model import LlamaModel
from engine_adapter.embedded.pace import PaceOptions
from engine_adapter.embedded.request import (
    Admitted,
    Constraint,
    EngineLoad,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    SamplingParams,
    Sink,
    Token,
)
from engine_adapter.embedded.sampling import choose, greedy, make_generator, replay
from engine_adapter.embedded.scheduler import Scheduler, SchedulerOptions, Step
from engine_adapter.embedded.sequence import Sequence
from engine_adapter.embedded.sessions import SessionPages
from kvstore.page import Tier
from kvstore.store import TieredStore

__all__ = [
    "Admitted",
    "Constraint",
    "Engine",
    "EngineLoad",
    "EngineOptions",
    "Finished",
    "GenerationEvent",
    "GenerationRequest",
    "RequestError",
    "SamplingParams",
    "Sink",
    "Token",
]

log = logging.getLogger(__name__)

_PAGE_RETRY_S = 0.01  # the store says nothing when it unpins a page that it has written through


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the engine. Without ``max_model_len`` it is the model's own, or what the device tier holds if less."""

    max_model_len: int | None = None
    max_running: int = 32  # sequences in a batch
    max_waiting: int = 1024  # requests in the queue; more are refused
    step_tokens: int = 512  # tokens of a step in which nobody decodes
    mixed_tokens: int = 128  # prompt tokens at most of a step in which somebody does
    mixed_s: float = 0.5  # what such a step should take at most: what a stream may have to wait for


class Engine:
    """Generates for many requests at once with one model on one store."""

    def __init__(self, model: LlamaModel, store: TieredStore, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        self.model, self.store, self.options = model, store, options
        device_tokens = store.device.slots * store.device.layout.page_tokens
        self.max_model_len = min(options.max_model_len or model.config.context_tokens,
                                 model.config.context_tokens, device_tokens)  # fmt: skip
        self._wake = threading.Event()
        self._cache = PageCache(store, on_loaded=self._wake.set)
        pace = PaceOptions(options.mixed_s, options.mixed_tokens)
        self._scheduler = Scheduler(self._cache, SchedulerOptions(options.max_running, options.step_tokens, pace))
        self._sessions = SessionPages()
        self._lock = threading.Lock()  # guards the six below
        self._live: dict[str, Sequence] = {}
        self._submitted: deque[Sequence] = deque()
        self._aborted: deque[str] = deque()
        self._closed: deque[str] = deque()  # sessions
        self._stopping = False
        self._numbers = 0
        self._finished: Counter[str] = Counter()
        self._hit_tokens: Counter[Tier] = Counter()
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._take_stock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the engine's thread; once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step; every live request finishes with reason ``abort``. Idempotent."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            self._conclude("abort")
        else:
            self._thread.join()

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request; its events go to ``sink``, the last one is ``Finished``. From any thread.

        Raises ``RequestError`` before anything is queued: empty, too long, an id out of range, a live id again, too
        many waiting, or an engine that is stopping.
        """
        self._validate(request)
        with self._lock:
            if self._stopping:
                raise RequestError("the engine is stopping", code="stopping")
            if request.request_id in self._live:
                raise RequestError(f"a request {request.request_id!r} is live already", param="rid", code="duplicate")
            if len(self._live) >= self.options.max_running + self.options.max_waiting:
                raise RequestError("too many requests are waiting", code="queue_full")
            sequence = Sequence(request, sink, self._numbers, make_generator(request.sampling))
            self._numbers += 1
            self._live[request.request_id] = sequence
            self._submitted.append(sequence)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """End a request with reason ``abort``, if it is live. From any thread; idempotent."""
        with self._lock:
            if request_id not in self._live:
                return
            self._aborted.append(request_id)
        self._wake.set()

    def close_session(self, session: str) -> None:
        """The run has ended: pages that only its requests have used go before all others, in every tier.

        From any thread; a session that is not known is no error.
        """
        with self._lock:
            self._closed.append(session)
        self._wake.set()

    def load(self) -> EngineLoad:
        """Return how busy the engine was after its last step, with what has changed since. From any thread."""
        with self._lock:
            new = list(self._submitted)
            counts, requests = self._counts, self._numbers
        uncached = counts.waiting_uncached_tokens + sum(sequence.remaining for sequence in new)
        used_pages = self._cache.device.slots - self._cache.available_pages
        return replace(
            counts,
            waiting=counts.waiting + len(new),
            waiting_uncached_tokens=uncached,
            used_tokens=used_pages * self._cache.page_tokens,
            requests=requests,
        )

    def _validate(self, request: GenerationRequest) -> None:
        tokens, sampling, given = request.token_ids, request.sampling, request.given_ids
        if not tokens:
            raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
        if sampling.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        if len(tokens) + sampling.max_tokens > self.max_model_len:
            raise RequestError(
                f"{len(tokens)} prompt tokens and {sampling.max_tokens} output tokens are more than the "
                f"{self.max_model_len} that fit",
                param="max_tokens" if len(tokens) < self.max_model_len else "prompt",
                code="context_length_exceeded",
            )
        if len(given) > sampling.max_tokens:
            raise RequestError("more output is given than max_tokens", param="max_tokens")
        if min(tokens + given) < 0 or max(tokens + given) >= self.model.config.vocab_size:
            raise RequestError(
                f"token ids must lie in 0 … {self.model.config.vocab_size - 1}",
                param="prompt",
                code="out_of_vocabulary",
            )
        if not (0 <= sampling.temperature < float("inf") and 0 < sampling.top_p <= 1):
            raise RequestError("temperature must be at least 0 and top_p in (0, 1]", param="temperature")

    def _run(self) -> None:
        """The engine's thread: whatever ends it, every request gets its last event."""
        reason: FinishReason = "abort"
        try:
            while not self._stopping:
                if not self.step():
                    blocked = self._scheduler.waiting and not self._scheduler.running
                    self.wait(_PAGE_RETRY_S if blocked else None)
        except Exception:  # the supervisor of everything that requests have in common: a bug, not a request's fault
            log.exception("the engine failed")
            reason = "error"
        self._conclude(reason)

    def _conclude(self, reason: FinishReason) -> None:
        """End every request and release every page."""
        with self._lock:
            self._stopping = True
        self._take_in()
        for sequence in list(self._live.values()):
            self._finish(sequence, reason, "the engine failed" if reason == "error" else None)
        self._scheduler.drain()

    def step(self) -> bool:
        """Take in what was submitted and aborted, and compute one step; ``False`` if there was nothing to compute.

        The engine's thread calls this in a loop; whoever wants no thread may call it instead of starting one.
        """
        self._wake.clear()
        self._take_in()
        step = self._scheduler.schedule()
        for sequence in step.admitted:
            assert sequence.hit_tokens is not None
            sequence.announced = True
            self._prompt_tokens += len(sequence.request.token_ids)
            self._hit_tokens.update(dict(zip(Tier, sequence.hit_tokens, strict=True)))
            self._tell(sequence, Admitted(sequence.hit_tokens))
        if step.chunks:
            began_s = monotonic()
            self._compute(step)
            self._scheduler.pace.took(step.prompt_tokens, step.decoding, monotonic() - began_s)
            self._steps += 1
        self._take_stock()
        return bool(step.chunks)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when a request, an abort or a page from a lower tier has come since ``step`` began, or in time."""
        self._wake.wait(timeout_s)

    def _take_in(self) -> None:
        """Move what other threads left into the scheduler."""
        with self._lock:
            submitted, aborted, closed = list(self._submitted), list(self._aborted), list(self._closed)
            self._submitted.clear()
            self._aborted.clear()
            self._closed.clear()
        for sequence in submitted:
            self._scheduler.add(sequence)
            if sequence.request.given_ids:
                self._go_on(sequence)
        for request_id in aborted:
            if (live := self._live.get(request_id)) is not None:
                self._finish(live, "abort")
        for session in closed:
            if private := self._sessions.close(session):
                self._cache.retire(private)

    def _go_on(self, sequence: Sequence) -> None:
        """Take up an answer where another engine left it; end it where that had said everything."""
        request = sequence.request
        try:
            tokens = [Token(token_id) for token_id in replay(sequence, self.model.config.vocab_size)]
            is_done = request.constraint is not None and request.constraint.finished
        except Exception as error:  # the request's boundary, as in ``_advance``
            log.info("request %s cannot be gone on with: %r", request.request_id, error)
            self._fail(sequence, error)
            return
        if request.given_ids[-1] in request.sampling.stop_token_ids or (is_done and not tokens):
            self._finish(sequence, "stop")
        elif sequence.output_tokens >= request.sampling.max_tokens:
            self._finish(sequence, "length")
        else:
            self._append(sequence, tokens, is_done)

    def _compute(self, step: Step) -> None:
        """Run the model over the step's chunks, publish full pages, sample where a prompt is complete."""
        spans = [
            Span(s.tokens[s.computed : s.computed + count], s.computed, s.slots, wants_logits=count == s.remaining)
            for s, count in step.chunks
        ]
        try:
            logits = self.model.forward(spans, self._cache.device.kv)
            best = greedy(logits)  # a GPU's errors show where its results are waited for
        except RuntimeError as error:  # torch's: out of memory, above all; the step's requests are lost, no others
            log.exception("a step failed")
            for sequence, _ in step.chunks:
                self._finish(sequence, "error", f"the step failed: {error}")
            return
        row = 0
        for (sequence, count), span in zip(step.chunks, spans, strict=True):
            sequence.computed += count
            self._cache.publish(sequence)
            if span.wants_logits:
                self._advance(sequence, logits[row], best[row])
                row += 1

    def _advance(self, sequence: Sequence, logits: torch.Tensor, best: int) -> None:
        """Choose the sequence's next token, add what a grammar forces after it, tell, and end it if that was the last.

        Forced tokens cost no step of their own: they are computed together, as a prompt is.
        """
        request = sequence.request
        try:
            tokens = [choose(sequence, logits, best)]
            if request.constraint is not None:
                tokens += map(Token, request.constraint.advance_forced())
            is_done = request.constraint is not None and request.constraint.finished
        except Exception as error:  # the request's boundary: a constraint may raise anything, and only its request ends
            log.info("request %s failed: %r", request.request_id, error)
            self._fail(sequence, error)
            return
        self._append(sequence, tokens, is_done)

    def _append(self, sequence: Sequence, tokens: list[Token], is_done: bool) -> None:
        """Add tokens to the output, tell, and end the sequence at its last one. ``is_done``: nothing may follow."""
        sampling = sequence.request.sampling
        for position, token in enumerate(tokens, start=1):
            sequence.tokens.append(token.token_id)
            self._generated_tokens += 1
            self._tell(sequence, token)
            last_of_all = is_done and position == len(tokens)
            if last_of_all or token.token_id in sampling.stop_token_ids:
                self._finish(sequence, "stop")
                return
            if sequence.output_tokens == sampling.max_tokens:
                self._finish(sequence, "length")
                return

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        told = Finished("error", str(error) or repr(error), asked_for=isinstance(error, ConstraintError))
        self._end(sequence, told)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self._end(sequence, Finished(reason, error))

    def _end(self, sequence: Sequence, last: Finished) -> None:
        """Release everything a live sequence holds, then send its last event."""
        if sequence.request.session is not None:
            self._sessions.used(sequence.request.session, self._cache.pages_of(sequence))
        self._scheduler.remove(sequence)
        with self._lock:
            del self._live[sequence.request.request_id]
        self._finished[last.reason] += 1
        self._take_stock()
        self._tell(sequence, last)

    def _tell(self, sequence: Sequence, event: GenerationEvent) -> None:
        try:
            sequence.sink(event)
        except Exception:  # the request's boundary: nobody listens any more, so nobody else may suffer
            log.exception("the sink of request %s failed; it is aborted", sequence.request.request_id)
            self.abort(sequence.request.request_id)

    def _take_stock(self) -> None:
        """Make the snapshot that ``load`` returns."""
        scheduler, cache = self._scheduler, self._cache
        loading = sum(sequence.loading is not None for sequence in scheduler.running)
        device, host, disk, pool = (self._hit_tokens[tier] for tier in Tier)
        counts = EngineLoad(
            running=len(scheduler.running) - loading,
            waiting=len(scheduler.waiting) + loading,
            waiting_uncached_tokens=sum(
                sequence.remaining for sequence in (*scheduler.waiting, *scheduler.running) if sequence.remaining > 1
            ),
            used_tokens=0,  # read when asked for: pages also come back without a step
            total_tokens=cache.device.slots * cache.page_tokens,
            requests=self._numbers,
            finished=dict(self._finished),
            preemptions=scheduler.preemptions,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=(device, host, disk, pool),
            generated_tokens=self._generated_tokens,
        )
        with self._lock:
            self._counts = counts
