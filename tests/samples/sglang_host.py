"""SGLang's side of its storage interface, without SGLang: host memory, configuration, keys.

Stand-ins: the real ones need SGLang and torch and come in ``tests/e2e/real_sglang``. Shapes and names are those that
0.5.23 was recorded with (``tests/captures/sglang_hicache_calls_*``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.plugins.sglang.backend import Backend
from kvstore.plugins.sglang.engine import EngineFacts

CAPTURES = Path(__file__).parents[1] / "captures"
WEIGHTS = "weights of the test"
FACTS = EngineFacts(version="0.5.23", settings={"kv_cache_dtype": "auto"})


class FakeHostPool:
    """Stands in for ``MHATokenToKVPoolHost``: K and V far apart, each page of one plane in one piece."""

    def __init__(
        self, *, pages: int = 64, page_size: int = 16, layers: int = 2, heads: int = 2, dim: int = 16, pieces: int = 2,
        dtype: str = "torch.bfloat16", layout: str = "page_first_direct",
    ) -> None:  # fmt: skip
        self.page_size, self.page_num, self.layout, self.dtype = page_size, pages, layout, dtype
        self.layer_num, self.head_num, self.head_dim = layers, heads, dim
        self.piece_bytes = layers * page_size * heads * dim * 2
        self.memory = np.zeros((pieces, pages, self.piece_bytes), np.uint8)

    @property
    def page_bytes(self) -> int:
        return self.memory.shape[0] * self.piece_bytes

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        slots = indices.tolist()
        assert len(slots) % self.page_size == 0
        addresses = [
            self.memory[plane, slot // self.page_size].ctypes.data
            for slot in slots[:: self.page_size]
            for plane in range(len(self.memory))
        ]
        return addresses, [self.piece_bytes] * len(addresses)

    def get_dummy_flat_data_page(self) -> FakeTensor:
        return FakeTensor(np.zeros(self.page_bytes, np.uint8))

    def slots(self, pages: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the token slots of these pages, as SGLang hands them over."""
        return np.array([page * self.page_size + at for page in pages for at in range(self.page_size)], np.int64)

    def fill(self, pages: Sequence[int], keys: Sequence[str]) -> None:
        """Put into each page what belongs to its key."""
        for page, key in zip(pages, keys, strict=True):
            self.memory[:, page] = page_content(key, self.page_bytes).reshape(len(self.memory), -1)

    def holds(self, page: int, key: str) -> bool:
        return bool((self.memory[:, page].reshape(-1) == page_content(key, self.page_bytes)).all())


class FakeTensor:
    """Stands in for a flat CPU tensor."""

    def __init__(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.array, self.device = array, SimpleNamespace(type="cpu")

    def is_contiguous(self) -> bool:
        return True

    def contiguous(self) -> FakeTensor:
        return self

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return 1


def page_content(key: str, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes that the page of this key has in tests."""
    return np.frombuffer(hashlib.shake_128(key.encode()).digest(length), np.uint8)


def key_chain(count: int, seed: str = "chain") -> list[str]:
    """Return so many keys as SGLang writes them."""
    return [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count)]


@dataclass
class FakeConfig:
    """Stands in for ``HiCacheStorageConfig``."""

    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "tiny"
    dcp_rank: int = 0
    dcp_size: int = 1


@dataclass
class Engine:
    """A backend as SGLang starts it, with its host memory."""

    options: dict[str, Any]
    pool: FakeHostPool = field(default_factory=FakeHostPool)
    facts: EngineFacts = FACTS
    side_pools: dict[str, FakeHostPool] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    zero_copy: bool = True
    weights_version: str = ""

    def __post_init__(self) -> None:
        own = {"backend_name": "keepwarm", "module_path": "m", "class_name": "c", "interface_v1": int(self.zero_copy)}
        patient = {"deadline_ms": 5000.0, "prefill_tokens_per_s": 0.001}  # whatever is held is worth waiting for
        extra = {**own, "weights_id": WEIGHTS, "buffer_gb": 0.002, **patient, **self.options}
        config = FakeConfig(extra, **self.config)
        self.backend = Backend(config, {}, facts=self.facts, version=lambda: self.weights_version)
        self.backend.register_mem_pool_host(self.pool)
        self.backend.register_mem_host_pool_v2(self.pool, "kv")
        for name, pool in self.side_pools.items():
            self.backend.register_mem_host_pool_v2(pool, name)
        self.backend.on_host_pools_registered()

    def store(self, keys: Sequence[str], first_page: int = 0) -> list[bool]:
        """Compute these pages and have them stored, to the last tier."""
        pages = range(first_page, first_page + len(keys))
        self.pool.fill(pages, keys)
        stored = self.backend.batch_set_v1(list(keys), self.pool.slots(pages))
        self.flush()
        return stored

    def flush(self) -> None:
        for shelf in self.backend.shelves.values():
            assert shelf.store.flush(20.0)

    def load(self, keys: Sequence[str], first_page: int = 32) -> list[bool]:
        """Fetch these pages; every one that is said to be there must be right."""
        pages = range(first_page, first_page + len(keys))
        self.pool.memory[:, list(pages)] = 0
        found = self.backend.batch_get_v1(list(keys), self.pool.slots(pages))
        for page, key, done in zip(pages, keys, found, strict=True):
            assert not done or self.pool.holds(page, key), "a wrong page was handed out as good"
        return found


def recorded_calls(interface: str) -> list[dict[str, Any]]:
    """Return what SGLang 0.5.23 called, in order."""
    lines = (CAPTURES / f"sglang_hicache_calls_{interface}_0.5.23.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
