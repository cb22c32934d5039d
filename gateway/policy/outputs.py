"""How long answers get: the mean of a run so far, drawn towards the mean of all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_PRIOR_ANSWERS = 4.0
_OVERALL_WEIGHT = 0.01
_MOST_KEYS = 16_384


class OutputLengths:
    """Expected output tokens by whatever groups answers: a run, an agent, a key. O(1)."""

    __slots__ = ("_keys", "overall")

    def __init__(self, overall: float = 300.0) -> None:
        self.overall = overall
        self._keys: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # key → answers, tokens

    def expected(self, key: Hashable) -> float:
        """Return the tokens that the next answer is expected to have."""
        answers, tokens = self._keys.get(key, (0.0, 0.0))
        return (_PRIOR_ANSWERS * self.overall + tokens) / (_PRIOR_ANSWERS + answers)

    def seen(self, key: Hashable, tokens: int) -> None:
        """An answer of this many tokens ended."""
        self.overall += _OVERALL_WEIGHT * (tokens - self.overall)
        answers, total = self._keys.pop(key, (0.0, 0.0))
        self._keys[key] = 0.9 * answers + 1, 0.9 * total + tokens
        if len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)
