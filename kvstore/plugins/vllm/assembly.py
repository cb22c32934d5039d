"""Puts a worker's half together: its blocks, what they are, and the tiers that keep them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvstore.deadline import Allowance
from kvstore.errors import MediumError
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

log = logging.getLogger(__name__)

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
    """Open this rank's tiers. A disk that can't be used is done without, and told.

    Raises ``UnsupportedCache``, ``MediumError`` for memory that isn't there or a pool's URL that is none, and
    ``ValueError`` for unknown weights.
    """
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
        try:
            tiers.append(_disk(options, options.disk_path, layout, replica))
        except MediumError as error:  # an engine serves without it
            log.error("keepwarm: this server goes without its disk: %s", error)
    if options.pool is not None:
        share = options.pool_bytes // layout.ranks
        tiers.append(PoolTier(layout, options.pool, capacity_bytes=share, options=pool_options(options)))
    return tiers


def _disk(options: ConnectorOptions, folder: Path, layout: PageLayout, replica: int) -> DiskTier:
    name = layout.fingerprint.hex() + (f"-dp{replica}" if replica else "")
    path, size = claim_disk(folder, name, options.disk_bytes // layout.ranks, options.disk_bytes)
    path.mkdir(parents=True, exist_ok=True)
    return DiskTier(layout, path, capacity_bytes=size, options=DiskOptions(read_s=allowance(options)))


def _memo(options: ConnectorOptions) -> Path | None:
    return None if options.disk_path is None else options.disk_path / _MEMO
