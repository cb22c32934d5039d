"""Puts a worker's half together: its blocks, what they are, and the tiers that keep them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import MediumError
from kvstore.page import PageLayout
from kvstore.plugins.disk_folder import claim_disk
from kvstore.plugins.vllm.identity import page_layout, weights_of
from kvstore.plugins.vllm.options import ConnectorOptions
from kvstore.plugins.vllm.paged_cache import PagedCache
from kvstore.plugins.vllm.shared_lookup import SharedLookup, SharedTier
from kvstore.plugins.vllm.worker import WorkerHalf, WorkerLimits
from kvstore.tiers.base import PageTier
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.shared_client import SharedHostOptions
from kvstore.tiers.shared_host import SharedHostTier

log = logging.getLogger(__name__)

_MEMO = "weights.json"


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
    limits = WorkerLimits(options.allowance, options.announce_pages)
    return WorkerHalf(layout.rank, cache, layout, open_tiers(options, layout, replica), limits)


def open_lookup(options: ConnectorOptions, layouts: Sequence[PageLayout]) -> SharedLookup | None:
    """Return the scheduler's way to ask tiers that others write to, too; ``None`` where there is none.

    ``layouts``: of every rank. Raises ``MediumError`` for a pool's URL that is none.
    """

    def shared(layout: PageLayout) -> list[SharedTier]:
        tiers: list[SharedTier] = []
        if options.host_path is not None:
            tiers.append(_shared_host(options, options.host_path, layout, is_asking=True))
        if options.pool is not None:
            limits = PoolOptions(read_s=options.allowance)
            tiers.append(PoolTier(layout, options.pool, capacity_bytes=layout.page_bytes, options=limits))
        return tiers

    return None if options.host_path is None and options.pool is None else SharedLookup(layouts, shared)


def open_tiers(options: ConnectorOptions, layout: PageLayout, replica: int = 0) -> list[PageTier]:
    """Open one rank's host, disk and pool, those that there are. A disk that can't be used is left out, and told."""
    retention = options.retention(1 / layout.ranks)
    tiers: list[PageTier] = []
    if options.host_path is not None:
        tiers.append(_shared_host(options, options.host_path, layout))
    else:
        tiers.append(HostTier(layout, capacity_bytes=options.host_bytes // layout.ranks, retention=retention))
    if options.disk_path is not None:
        try:
            tiers.append(_disk(options, options.disk_path, layout, replica))
        except MediumError as error:  # an engine serves without it
            log.error("keepwarm: this server goes without its disk: %s", error)
    if options.pool is not None:
        share = options.pool_bytes // layout.ranks
        limits = PoolOptions(read_s=options.allowance)
        tiers.append(PoolTier(layout, options.pool, capacity_bytes=share, retention=retention, options=limits))
    return tiers


def _shared_host(
    options: ConnectorOptions, socket: Path, layout: PageLayout, *, is_asking: bool = False
) -> SharedHostTier:
    """``is_asking``: for the scheduler, which moves no pages."""
    return SharedHostTier(
        layout,
        socket,
        capacity_bytes=options.host_bytes // layout.ranks,
        retention=options.retention(1 / layout.ranks),
        options=SharedHostOptions(ask_s=options.allowance, follows=not is_asking, maps=not is_asking),
    )


def _disk(options: ConnectorOptions, folder: Path, layout: PageLayout, replica: int) -> DiskTier:
    name = layout.fingerprint.hex() + (f"-dp{replica}" if replica else "")
    path, size = claim_disk(folder, name, options.disk_bytes // layout.ranks, options.disk_bytes)
    path.mkdir(parents=True, exist_ok=True)
    retention = options.retention(1 / layout.ranks)
    return DiskTier(
        layout, path, capacity_bytes=size, retention=retention, options=DiskOptions(read_s=options.allowance)
    )


def _memo(options: ConnectorOptions) -> Path | None:
    return None if options.disk_path is None else options.disk_path / _MEMO
