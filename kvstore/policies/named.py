"""The policies by the names that people choose them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.policies.arc import Arc
from kvstore.policies.learned_reuse import LearnedReuse
from kvstore.policies.lfu import AgingLfu
from kvstore.policies.s3_fifo import S3Fifo
from kvstore.policy import EvictionPolicy, PrefixLru

POLICIES: dict[str, Callable[[], EvictionPolicy[Any]]] = {
    "lru": PrefixLru,
    "lfu": AgingLfu,
    "s3-fifo": S3Fifo,
    "arc": Arc,
    "learned": LearnedReuse,
}
