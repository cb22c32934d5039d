"""What prompts would have hit had nobody repaired them: each instance's cache as their own blocks would have left it.

Comparing with the repaired prompts' cache would flatter the repair, since nothing unrepaired was ever sent there. So
each instance has a double that is told the prompts as they came, and forgets as a cache of that size does.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.prompt_job import Prompt
from radix_index.index import RadixIndex
from radix_index.predict import PredictedResidency

BYTE_BUDGET = 32 << 20
MAX_INSTANCES = 256
DEFAULT_CAPACITY_TOKENS = 262_144


class Unrepaired:
    """The doubles of all instances that got repaired prompts."""

    def __init__(self) -> None:
        self._index = RadixIndex(byte_budget=BYTE_BUDGET)
        self._doubles: OrderedDict[tuple[str, int], PredictedResidency] = OrderedDict()

    def hits(self, instance: str, capacity_tokens: int | None, prompt: Prompt) -> int:
        """Return how many tokens of a prompt, as it came, would have been found there; it is there from now on."""
        if not prompt.hashes:
            return 0
        size = min(prompt.hashes)
        double = self._double(instance, size, capacity_tokens or DEFAULT_CAPACITY_TOKENS)
        expectation = double.expect(prompt.hashes[size], prompt.tokens)
        double.computed(expectation)
        return min(expectation.blocks, max(prompt.tokens - 1, 0) // size) * size

    def _double(self, instance: str, block_size: int, capacity_tokens: int) -> PredictedResidency:
        key = (instance, block_size)
        double = self._doubles.get(key)
        if double is None:
            name = f"{instance}/{block_size}"
            double = self._doubles[key] = PredictedResidency(
                self._index, name, block_size=block_size, capacity_tokens=capacity_tokens
            )
            if len(self._doubles) > MAX_INSTANCES:
                _, gone = self._doubles.popitem(last=False)
                self._index.remove_instance(gone.instance)
        self._doubles.move_to_end(key)
        return double
