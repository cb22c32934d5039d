"""Choosing the next tokens of a step from its logits."""

from __future__ import annotations

import torch

from engine_adapter.embedded.request import SamplingParams, Token
from engine_adapter.embedded.sequence import Sequence


def make_generator(sampling: SamplingParams) -> torch.Generator | None:
    """Return the request's own source of randomness; ``None`` for greedy. Without a seed it differs each time."""
    if sampling.temperature <= 0:
        return None
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
    return generator


def replay(sequence: Sequence, vocab_size: int) -> list[int]:
    """Bring grammar and chance to where the output that was given had left them; O(given tokens).

    Returns the tokens that the grammar forces behind it. Raises whatever the constraint raises, and ``ValueError`` for
    output that the grammar would not have made.
    """
    given, constraint, generator = sequence.request.given_ids, sequence.request.constraint, sequence.generator
    position, forced = 0, list[int]()
    while position < len(given):
        if generator is not None:
            torch.multinomial(torch.ones(vocab_size), 1, generator=generator)  # draws as many numbers as a choice does
        forced = []
        if constraint is not None:
            constraint.accept(given[position])
            forced = constraint.advance_forced()
        position += 1
        known = given[position : position + len(forced)]
        if list(known) != forced[: len(known)]:
            raise ValueError("the given output is none of this grammar")
        position, forced = position + len(known), forced[len(known) :]
    return forced


@torch.inference_mode()
def greedy(logits: torch.Tensor) -> list[int]:
    """Return the best token of each row of (rows, vocab); the lowest id among equals."""
    best: list[int] = logits.argmax(-1).tolist()
    return best


@torch.inference_mode()
def choose(sequence: Sequence, logits: torch.Tensor, best: int) -> Token:
    """Choose the next token from logits (vocab,), of which ``best`` is the greatest.

    A constraint's mask comes first, then temperature, then top-p. The log-probability is that of the token under the
    model itself, before any of them. Raises whatever the constraint raises, and ``ValueError`` where it allows nothing.
    """
    sampling, constraint = sequence.request.sampling, sequence.request.constraint
    token_id, allowed = best, logits
    mask = constraint.mask() if constraint is not None else None
    if mask is not None:
        if mask.shape != logits.shape:
            raise ValueError(f"the constraint's mask has shape {tuple(mask.shape)}, not {tuple(logits.shape)}")
        allowed = logits.masked_fill(~mask.to(logits.device), -torch.inf)
        token_id = int(allowed.argmax())
        if allowed[token_id] == -torch.inf:
            raise ValueError("the constraint allows no token")
    if sequence.generator is not None:
        token_id = sample(allowed, sampling.temperature, sampling.top_p, sequence.generator)
    if constraint is not None:
        constraint.accept(token_id)
    logprob = float(logits.float().log_softmax(-1)[token_id]) if sampling.logprobs else None
    return Token(token_id, logprob)


def sample(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw from softmax(logits / temperature), cut to the fewest best tokens whose probability reaches ``top_p``."""
    probabilities = (logits.float().cpu() / temperature).softmax(-1)
    if top_p >= 1:
        return int(torch.multinomial(probabilities, 1, generator=generator))
    ranked, ids = probabilities.sort(descending=True, stable=True)
    outside = ranked.cumsum(-1) - ranked >= top_p  # the best token is never outside: its sum before it is 0
    ranked[outside] = 0.0
    return int(ids[torch.multinomial(ranked, 1, generator=generator)])
