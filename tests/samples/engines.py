"""Embedded engines for tests: tiny random models in float64, and a driver that needs no thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import torch
import transformers

from engine_adapter.embedded.engine import (
    Admitted,
    Constraint,
    Engine,
    EngineOptions,
    Finished,
    GenerationEvent,
    GenerationRequest,
    SamplingParams,
    Token,
)
from engine_adapter.embedded.model import LlamaModel
from engine_adapter.embedded.weights import load_model
from kvstore.store import TieredStore
from kvstore.tiers.base import PageTier
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.device_copies import OpenCopies, open_copies

VOCAB = 199
_TINY: dict[str, object] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.4,
}  # fmt: skip


def make_tiny_model(folder: Path, architecture: str = "llama", **changes: object) -> transformers.PreTrainedModel:
    """Write a random model as a Hugging Face folder; return it in float64.

    At that precision two ways to compute the same logits differ by 1e-12, so that no test depends on a near tie.
    """
    torch.manual_seed(20)
    config = transformers.AutoConfig.for_model(architecture, **{**_TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("bias", "norm.weight")
        ):  # transformers starts them at 0 and 1, where a mistake would not show
            torch.nn.init.normal_(parameter, 0.8, 0.3)
    model.save_pretrained(folder)
    return model


def load_tiny_model(folder: Path, device: str = "cpu") -> LlamaModel:
    """Load what ``make_tiny_model`` wrote."""
    return load_model(folder, torch.float64, device)


def make_engine(
    model: LlamaModel,
    *,
    pages: int,
    lower: Sequence[PageTier] = (),
    page_tokens: int = 4,
    copies: OpenCopies = open_copies,
    **options: int,
) -> Engine:
    """Return an engine that was not started, on a store of its own, on the model's device."""
    device = DeviceTier(model.page_layout("tiny", page_tokens), pages=pages, device=str(model.device), copies=copies)
    return Engine(model, TieredStore(device, lower), EngineOptions(**options))


@dataclass(slots=True)
class Answer:
    """What a request's sink was told."""

    events: list[GenerationEvent] = field(default_factory=list)

    @property
    def hit_tokens(self) -> tuple[int, int, int, int]:
        """As the one ``Admitted`` says."""
        (admitted,) = [event for event in self.events if isinstance(event, Admitted)]
        return admitted.hit_tokens

    @property
    def tokens(self) -> list[int]:
        """The output."""
        return [event.token_id for event in self.events if isinstance(event, Token)]

    @property
    def finished(self) -> Finished | None:
        """The last event, if it has come; nothing may follow it."""
        ends = [index for index, event in enumerate(self.events) if isinstance(event, Finished)]
        assert ends in ([], [len(self.events) - 1]), self.events
        last = self.events[-1] if ends else None
        assert last is None or isinstance(last, Finished)
        return last

    @property
    def reason(self) -> str | None:
        """Why it ended; ``None`` while it has not."""
        return self.finished.reason if self.finished else None


def ask(
    engine: Engine,
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    temperature: float = 0.0,
    salt: str | None = None,
    constraint: Constraint | None = None,
    priority: int = 0,
    session: str | None = None,
    **sampling: object,
) -> Answer:
    """Submit a request, greedy unless told otherwise; the answer fills as the engine goes."""
    answer = Answer()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling)  # type: ignore[arg-type]
    request = GenerationRequest(request_id, tuple(prompt), params, salt, constraint, priority, session)
    engine.submit(request, answer.events.append)
    return answer


def run(engine: Engine, *answers: Answer, steps: int = 10_000) -> None:
    """Step the engine until these answers are complete."""
    for _ in range(steps):
        if all(answer.finished for answer in answers):
            return
        if not engine.step():
            engine.wait(1.0)  # for pages on their way
    raise AssertionError(f"not finished after {steps} steps")


def assert_nothing_held(engine: Engine) -> None:
    """Every page is free or evictable, and every tier's invariants hold. For engines without a thread.

    Waits for the store: until it has stopped writing, an aborted sequence's pages are its own.
    """
    assert engine.store.flush(10)
    device = engine.store.device
    until_s = monotonic() + 10
    while device.free_pages + device.evictable_pages < device.slots and monotonic() < until_s:
        engine.step()
        engine.wait(0.01)
    assert device.free_pages + device.evictable_pages == device.slots
    engine.store.check()
