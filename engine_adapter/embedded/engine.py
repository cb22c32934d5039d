"""The embedded engine: one thread that admits, computes a step, samples, and tells."""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.embedded.errors import RequestError
from engine_adapter.embedded.request import (
    Admitted,
    Constraint,
    EngineLoad,
    Finished,
    GenerationEvent,
    GenerationRequest,
    SamplingParams,
    Sink,
    Token,
)

__all__ = [
    "Admitted",
    "Constraint",
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


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the engine. ``None`` takes the model's own context length, or what the device tier holds if less."""

    max_model_len: int | None = None
    max_running: int = 32          # sequences in a batch
    max_waiting: int = 1024        # requests in the queue; more are refused
    step_tokens: int = 512         # tokens computed in a step, decodes included: the most that a decode waits for prefill
