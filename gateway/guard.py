"""The cache guard: a request may demand a warm prefix, and is refused at once where it would be a cold one.

``x-keepwarm-min-hit`` is a number of prompt tokens (``4096``) or a share of the prompt (``0.8``, ``80%``) that must be
cached where the request goes, as far as the index knows. Instances that are not warm enough are left out of the choice;
where that leaves none, the answer is 412: official clients send 409, 429 and 5xx again by themselves, and a prefix does
not become warm by asking. An engine computes at least a prompt's last token, so a share of 1 is never met.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from gateway.errors import BadRequest, ColdPrefix
from tracing.record import Decision

HEADER = "x-keepwarm-min-hit"
_DEMAND = re.compile(
    r"(?P<tokens>[0-9]{1,9})|(?P<share>[01]?\.[0-9]{1,6})|(?P<percent>[0-9]{1,3}(\.[0-9]{1,4})?)%", re.A
)


@dataclass(frozen=True, slots=True)
class MinHit:
    """What is demanded: so many tokens, or such a share of the prompt."""

    tokens: int | None = None
    share: Fraction | None = None

    def needed(self, prompt_tokens: int | None) -> int | None:
        """Return the tokens that must be cached; ``None`` where a share is asked of a prompt that nobody counted."""
        if self.tokens is not None:
            return self.tokens
        if prompt_tokens is None or self.share is None:
            return None
        return -(-prompt_tokens * self.share.numerator // self.share.denominator)

    def cold(self, decision: Decision | None, prompt_tokens: int | None) -> frozenset[str]:
        """Return the instances that are not warm enough. Raises ``ColdPrefix`` where all are that take requests.

        ``decision``: what would be decided without the demand; ``None``: nobody takes requests, which is another error.
        """
        if decision is None:
            return frozenset()
        needed = self.needed(prompt_tokens)
        if needed is None:
            raise ColdPrefix("the prompt could not be tokenized, so nobody knows what of it is cached", param=HEADER)
        hits = {candidate.instance: sum(candidate.hit_tokens) for candidate in decision.candidates}
        cold = frozenset(instance for instance, hit in hits.items() if hit < needed)
        warm = [c.instance for c in decision.candidates if c.healthy and c.instance not in cold]
        if not warm:
            most = max((sum(c.hit_tokens) for c in decision.candidates if c.healthy), default=0)
            raise ColdPrefix(f"{most} tokens of the prompt are cached, and {needed} are demanded", param=HEADER)
        return cold


def min_hit_of(headers: Mapping[str, str]) -> MinHit | None:
    """Return what the request demands, ``None`` without the header. Raises ``BadRequest`` for anything else."""
    value = headers.get(HEADER)
    if value is None:
        return None
    found = _DEMAND.fullmatch(value.strip())
    if found is not None:
        if found["tokens"] is not None:
            return MinHit(tokens=int(found["tokens"]))
        share = Fraction(Decimal(found["share"])) if found["share"] is not None else Fraction(found["percent"]) / 100
        if share <= 1:
            return MinHit(share=share)
    raise BadRequest(f"{HEADER} is a number of tokens (4096) or a share of the prompt (0.8 or 80%)", param=HEADER)
