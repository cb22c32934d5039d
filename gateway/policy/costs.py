"""What prompts, steps and fetches take on one instance, in seconds, learned from what answers took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.policy.fit import LinearFit

_FETCH_WEIGHT = 0.2
_FETCH_RATIOS = (0.25, 4.0)
_OVERHEAD_S = 0.01
_SAMPLE_TOKENS = 1024
_LEAST_SHARE = 1e-3
"""Of what a token was believed to take at first, what it takes at the least: where prompts seem to take the same time
whatever their length, computing is still work and a prefix still worth going to."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second: computing a prompt at no context, reading pages of each tier, and decoding one sequence.

    ``peer``: from another instance's device; ``None`` where instances cannot read each other's pages.
    """

    prefill: float
    host: float
    disk: float
    pool: float
    peer: float | None = None
    decode: float = 50.0


class Fetch(NamedTuple):
    """Prompt tokens that are read and not computed, by where they are read from."""

    host: int = 0
    disk: int = 0
    pool: int = 0
    peer: int = 0


class EngineCosts:
    """The costs of instances of one kind: one model on one kind of engine; each has a pace of its own (``Load``).

    * a prompt: ``overhead + new · (a + (context + new / 2) · q + context decoding beside it · d)``
    * a decode step: ``base + context of all sequences · k + share of the time in which a prompt is computed · i``
    """

    __slots__ = ("_fetch_s", "pace", "prompts", "rates", "steps")

    def __init__(self, rates: Rates) -> None:
        self.rates = rates  # where learning began
        self.pace = 1.0  # the mean of its instances' (``Load``)
        token_s, step_s = 1 / rates.prefill, 1 / rates.decode
        self.prompts = LinearFit(
            (_OVERHEAD_S, token_s, 0.0, 0.0), (_OVERHEAD_S, token_s, token_s / 20_000, token_s / 500_000)
        )
        self.steps = LinearFit((step_s, 0.0, 0.0), (step_s, step_s / 200_000, step_s))
        peer_s = 0.0 if rates.peer is None else 1 / rates.peer
        self._fetch_s = [1 / rates.host, 1 / rates.disk, 1 / rates.pool, peer_s]

    def prompt_s(self, new_tokens: int, context_tokens: int, beside_tokens: float = 0.0) -> float:
        """Return how long ``new_tokens`` behind ``context_tokens`` take while ``beside_tokens`` of context decode."""
        overhead_s, token_s, grown_s, beside_s = self.prompts.weights
        each_s = token_s + beside_s * beside_tokens + grown_s * (context_tokens + 0.5 * new_tokens)
        return overhead_s + new_tokens * each_s

    def token_s(self, context_tokens: int) -> float:
        """Return what a token takes, one of a thousand behind ``context_tokens``, with nothing beside them."""
        _, token_s, grown_s, _ = self.prompts.weights
        return token_s + grown_s * (context_tokens + 0.5 * _SAMPLE_TOKENS)

    def learn_prompt(self, new_tokens: int, context_tokens: int, beside_tokens: float, seconds: float) -> None:
        """Take in that a prompt was served in ``seconds``, its wait not counted."""
        if seconds > 0:
            grown = new_tokens * (context_tokens + 0.5 * new_tokens)
            self.prompts.learn((1.0, new_tokens, grown, new_tokens * beside_tokens), seconds)
            weights = self.prompts.weights
            weights[1] = max(weights[1], _LEAST_SHARE / self.rates.prefill)

    def fetch_s(self, fetch: Fetch) -> float:
        """Return the time that these tokens take on an idle link."""
        host, disk, pool, peer = self._fetch_s
        return fetch.host * host + fetch.disk * disk + fetch.pool * pool + fetch.peer * peer

    def learn_fetch(self, fetch: Fetch, seconds: float) -> None:
        """Take in that an idle link took ``seconds``: the tiers share the blame as they share the estimate."""
        expected_s = self.fetch_s(fetch)
        if expected_s <= 0:
            return
        least, most = _FETCH_RATIOS
        change = min(max(seconds / expected_s, least), most) - 1
        for at, tokens in enumerate(fetch):
            share = tokens * self._fetch_s[at] / expected_s
            self._fetch_s[at] *= 1 + _FETCH_WEIGHT * share * change

    @property
    def tier_s(self) -> tuple[float, float, float]:
        """What a token takes to be read from host memory, disk and pool."""
        host_s, disk_s, pool_s, _ = self._fetch_s
        return host_s, disk_s, pool_s

    @property
    def read_s(self) -> float:
        """What one more token of context adds to a decode step."""
        return self.steps.weights[1]

    def step_s(self, context_tokens: float, prompt_share: float = 0.0) -> float:
        """Return what a decode step takes with so many tokens of context behind all its sequences."""
        base_s, read_s, prompt_s = self.steps.weights
        return base_s + read_s * context_tokens + prompt_s * prompt_share

    @property
    def stall_share(self) -> float:
        """The share of a prompt's time that sequences decoding beside it lose."""
        base_s, _, prompt_s = self.steps.weights
        return prompt_s / (base_s + prompt_s) if prompt_s else 0.0

    def learn_step(self, context_tokens: float, prompt_share: float, seconds: float) -> None:
        """Take in the mean step of an answer and the mean load beside it."""
        if seconds > 0:
            self.steps.learn((1.0, context_tokens, prompt_share), seconds)

    def learned(self) -> Rates:
        """Return the rates as they are believed to be now."""
        token_s, step_s = self.prompts.weights[1], self.step_s(0.0)
        host_s, disk_s, pool_s, peer_s = self._fetch_s
        return Rates(
            prefill=1 / token_s if token_s > 0 else self.rates.prefill,
            host=1 / host_s,
            disk=1 / disk_s,
            pool=1 / pool_s,
            peer=1 / peer_s if peer_s else None,
            decode=1 / step_s if step_s > 0 else self.rates.decode,
        )
