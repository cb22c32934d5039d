"""How many prompt tokens a step may compute while streams wait for it. Pure: times are given.

A limit in tokens alone is a different wait on every machine, and on one machine under every load: what a GPU computes
in a millisecond takes a busy core a second. So the limit is a time, and what a token takes is learned from the steps
before: a step of ``n`` prompt tokens beside decoding sequences takes what decoding alone takes, and ``n`` times that.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEW = 0.25  # the weight of the newest step


@dataclass(frozen=True, slots=True)
class PaceOptions:
    """A step with ``most_tokens`` of prompts or fewer, down to ``least_tokens``, should take ``limit_s``."""

    limit_s: float = 0.5
    most_tokens: int = 128
    least_tokens: int = 16


class Pace:
    """What a step takes, as far as is learned."""

    def __init__(self, options: PaceOptions) -> None:
        self._options = options
        self._decode_s = 0.0  # of a step that only decodes
        self._prompts_s = self._prompt_tokens = 0.0  # of prompts, beside that; sums that forget

    def mixed_tokens(self) -> int:
        """Return how many prompt tokens fit the next step in which somebody decodes."""
        most, least = self._options.most_tokens, min(self._options.least_tokens, self._options.most_tokens)
        left_s = self._options.limit_s - self._decode_s
        if left_s * self._prompt_tokens >= most * self._prompts_s:
            return most
        return max(int(left_s * self._prompt_tokens / self._prompts_s), least)

    def took(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        """A step of so many prompt tokens beside so many decoding sequences is over."""
        if not prompt_tokens:
            self._decode_s = self._decode_s + _NEW * (seconds - self._decode_s) if self._decode_s else seconds
            return
        beside_s = self._decode_s if decoding else 0.0
        self._prompts_s = (1 - _NEW) * self._prompts_s + max(seconds - beside_s, 0.0)
        self._prompt_tokens = (1 - _NEW) * self._prompt_tokens + prompt_tokens
