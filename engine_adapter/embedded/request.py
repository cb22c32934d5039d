"""What is asked of the engine, and what it tells about each request: plain values, no behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. ``temperature`` 0 is greedy; a ``seed`` makes sampling repeatable.

    ``max_tokens`` counts output tokens. A stop token ends the output and is itself delivered, as it is
    billed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False


class Constraint(Protocol):
    """The state of a grammar for one sequence. Used on the engine's thread only; what it raises ends its request."""

    def mask(self) -> torch.Tensor | None:
        """Return the allowed next tokens as bool of shape (vocab,), or ``None`` where everything is allowed."""

    def accept(self, token_id: int) -> None:
        """Advance by the token that was chosen."""

    def advance_forced(self) -> list[int]:
        """Advance by the tokens that must come next whatever the model says, and return them; often none."""

    @property
    def finished(self) -> bool:
        """Nothing may follow any more; the request ends with reason ``stop``."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. Pages are shared under equal ``salt`` only; a higher ``priority`` goes first.

    ``session``: the run that it belongs to, whose pages go first once that has ended (``Engine.close_session``).
    ``given_ids``: output that another engine has generated already, and told; this one goes on behind it as if it had
    been its own, with the grammar and the seed where they then are.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str | None = None
    constraint: Constraint | None = None
    priority: int = 0
    session: str | None = None
    given_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt's first token is about to be computed.

    ``hit_tokens`` of it, and of what was given of its answer, come from device, host, disk and pool.
    """

    hit_tokens: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Token:
    """One output token; ``logprob`` is the natural logarithm of its probability, when it was asked for."""

    token_id: int
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every request. ``error`` says what happened when ``reason`` is ``error``, ``asked_for`` that
    the request brought it about itself: by a grammar that nothing can satisfy."""

    reason: FinishReason
    error: str | None = None
    asked_for: bool = False


GenerationEvent = Admitted | Token | Finished
Sink = Callable[[GenerationEvent], None]
"""Receives a request's events in order, from the engine's thread; it must return at once."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine at one moment, and its counters since it started. All of one snapshot."""

    running: int  # requests in the batch
    waiting: int  # requests that wait for admission or for pages on their way
    waiting_uncached_tokens: int  # prompt tokens still to be computed, of everybody
    used_tokens: int  # token slots of device pages that a request, or a copy to lower tiers, holds
    total_tokens: int  # token slots of the device tier
    requests: int  # accepted so far
    finished: dict[str, int]  # by reason
    preemptions: int
    steps: int
    prompt_tokens: int
    hit_tokens: tuple[int, int, int, int]  # device, host, disk, pool
    generated_tokens: int
