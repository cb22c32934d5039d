"""Whose pages are whose: everything that the bytes of a page depend on, as one fingerprint.

SGLang's keys name tokens, salt and adapter of a page and nothing else; two servers of which anything below differs must
never exchange one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.page import PageKey, PageLayout, page_key
from kvstore.plugins.sglang.engine import EngineFacts

PLUGIN_FORMAT = 1
"""Bump it when the order of a page's pieces changes."""

RANK_SHARDED = frozenset({"mamba"})
"""Pools of which every tensor-parallel rank has a part of its own, even where the model's KV is the same on all."""

_HEX_DIGEST = re.compile("[0-9a-f]{64}")
_SHAPE = ("head_num", "head_dim", "v_head_dim", "layer_num", "start_layer", "end_layer",
          "kv_lora_rank", "qk_rope_head_dim", "size_per_token", "storage_format_tag")  # fmt: skip
"""What host pools say of the shape of their pages, whichever have it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of which model this process holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla: bool = False
    model_name: str = ""  # as it is served, with the tag of the host pool's page format where that has one

    @property
    def writes(self) -> bool:
        """Whether it is this rank that stores pages which all ranks of its group have alike."""
        return not self.is_mla or self.tp_rank == self.dcp_rank

    @property
    def is_first(self) -> bool:
        """Whether it is the one rank of its replica that tells of events, as in the engine."""
        return self.tp_rank == self.pp_rank == self.cp_rank == 0

    @property
    def ranks(self) -> int:
        """How many processes of one replica store pages apart from each other."""
        return (1 if self.is_mla else self.tp_size) * self.pp_size * self.cp_size


def read_shard(config: Any) -> Shard:
    """Read SGLang's ``HiCacheStorageConfig``; older versions lack some of it."""
    return Shard(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=getattr(config, "pp_rank", 0),
        pp_size=getattr(config, "pp_size", 1),
        cp_rank=getattr(config, "attn_cp_rank", 0),
        cp_size=getattr(config, "attn_cp_size", 1),
        dcp_rank=getattr(config, "dcp_rank", 0),
        dcp_size=getattr(config, "dcp_size", 1),
        is_mla=bool(config.is_mla_model),
        model_name=config.model_name or "",
    )


def page_layout(
    pool: Any,
    name: str,
    *,
    page_bytes: int,
    weights_id: str,
    namespace: str,
    shard: Shard,
    facts: EngineFacts,
    zero_copy: bool,
) -> PageLayout:
    """Return the layout of one host pool's pages.

    The store need not know what is in a page: it is ``page_bytes`` bytes, and ``order`` says all that they depend on.
    Under MLA every rank of a group has the same pages, so they are named without the rank.
    """
    is_alike = shard.is_mla and name not in RANK_SHARDED
    described = {
        "plugin": PLUGIN_FORMAT,
        "engine": f"sglang {facts.version}",
        "settings": dict(facts.settings),
        "namespace": namespace,
        "model": shard.model_name,
        "pool": name,
        "order": "pieces" if zero_copy else "flat",
        "class": type(pool).__name__,
        "dtype": str(getattr(pool, "dtype", None)),
        "layout": pool.layout,
        "shape": _shape(pool),
        "pp": [shard.pp_rank, shard.pp_size],
        "cp": [shard.cp_rank, shard.cp_size],
        "dcp": [shard.dcp_rank, shard.dcp_size],
    }
    tokens = pool.page_size if page_bytes % pool.page_size == 0 else 1
    return PageLayout(
        weights_id=weights_id,
        dtype="uint8",
        page_tokens=tokens,
        layers=1,
        kv_heads=1,
        head_dim=page_bytes // tokens,
        order=json.dumps(described, sort_keys=True),
        rank=0 if is_alike else shard.tp_rank,
        ranks=1 if is_alike else shard.tp_size,
        is_mla=True,
    )


def _shape(pool: Any) -> Mapping[str, str]:
    return {name: str(value) for name in _SHAPE if (value := getattr(pool, name, None)) is not None}


def content_hash(key: str) -> bytes:
    """Return the digest that a key of SGLang's writes out in hex; of any other key its own digest."""
    if _HEX_DIGEST.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.sha256(key.encode()).digest()


def keys_of(layout_fingerprint: bytes, keys: Sequence[str]) -> list[PageKey]:
    """Return our names for SGLang's keys."""
    return [page_key(layout_fingerprint, content_hash(key)) for key in keys]
