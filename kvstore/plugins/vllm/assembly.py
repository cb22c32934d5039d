"""Puts a worker's half together: its blocks, what they are, and the tiers that keep them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvstore.deadline import Allowance
from kvstore.page import PageLayout
from kvstore.plugins.disk_folder import claim_disk
from kvstore.plugins.vllm.identity import page_layout, weights_of
from kvstore.plugins.vllm.options import ConnectorOptions
from kvstore.plugins.vllm.paged_cache import PagedCache
from kvstore.plugins.vllm.worker import WorkerHalf, WorkerLimits
from kvstore.tiers.base import PageTier
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_topology import PoolOptions

_MEMO = "weights.json"


def allowance(options: ConnectorOptions) -> Allowance:
    """Return how long a load may take."""
    return Allowance(options.deadline_ms / 1000, int(options.least_mb_per_s * 1_000_000))


def pool_options(options: ConnectorOptions) -> PoolOptions:
    """Return the limits of the pool's requests."""
    return PoolOptions(read_s=allowance(options))


def open_worker(
    options: ConnectorOptions, vllm_config: Any, kv_caches: Mapping[str, torch.Tensor], blocks: int, version: str
) -> WorkerHalf:
    """Open this rank's tiers. Raises ``UnsupportedCache``, ``MediumError``, and ``ValueError`` for unknown weights."""
    cache = PagedCache(kv_caches, blocks)
    model = vllm_config.model_config
    weights_id = options.weights_id or weights_of(model.model, model.revision, _memo(options))
    layout = page_layout(cache, vllm_config, weights_id=weights_id, namespace=options.namespace, version=version)
    replica = getattr(vllm_config.parallel_config, "data_parallel_rank", 0)
    limits = WorkerLimits(allowance(options), options.announce_pages)
    return WorkerHalf(layout.rank, cache, layout, _tiers(options, layout, replica), limits)


def _tiers(options: ConnectorOptions, layout: PageLayout, replica: int) -> list[PageTier]:
    tiers: list[PageTier] = [HostTier(layout, capacity_bytes=options.host_bytes // layout.ranks)]
    if options.disk_path is not None:
        name = layout.fingerprint.hex() + (f"-dp{replica}" if replica else "")
        path, size = claim_disk(options.disk_path, name, options.disk_bytes // layout.ranks, options.disk_bytes)
        path.mkdir(parents=True, exist_ok=True)
        disk = DiskOptions(read_s=allowance(options))
        tiers.append(DiskTier(layout, path, capacity_bytes=size, options=disk))
    if options.pool is not None:
        share = options.pool_bytes // layout.ranks
        tiers.append(PoolTier(layout, options.pool, capacity_bytes=share, options=pool_options(options)))
    return tiers


def _memo(options: ConnectorOptions) -> Path | None:
    return None if options.disk_path is None else options.disk_path / _MEMO
