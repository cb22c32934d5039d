"""The product's index. (This first version is the oracle's dictionaries behind the final interface.)"""

from __future__ import annotations

from radix_index.naive import NaiveIndex


class RadixIndex(NaiveIndex):
    """See ``radix_index.base.PrefixIndex``."""

    def __init__(self, *, byte_budget: int = 256 * 2**20) -> None:
        super().__init__()
        self.byte_budget = byte_budget
