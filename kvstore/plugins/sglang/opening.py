"""From options and host pools to open tiers: the plug-in's composition root."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.announce import tier_events
from kvstore.errors import MediumError
from kvstore.events import TierCleared
from kvstore.memory import IS_COMPILED
from kvstore.page import PageLayout, Tier
from kvstore.plugins.disk_folder import claim_disk
from kvstore.plugins.sglang.engine import EngineEvents, EngineFacts, local_model
from kvstore.plugins.sglang.identity import RANK_SHARDED, Shard, page_layout
from kvstore.plugins.sglang.memory import pages_at
from kvstore.plugins.sglang.options import PluginOptions, host_and_port
from kvstore.plugins.sglang.relay import EventRelay, relay_for
from kvstore.plugins.sglang.shelf import Shelf, ShelfOptions
from kvstore.plugins.weights import weights_digest
from kvstore.publisher import PublisherOptions
from kvstore.retention import Retention, RetentionRules
from kvstore.tiers.base import OnChange, PagesStored, PageTier, TierChange
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.shared_client import SharedHostOptions
from kvstore.tiers.shared_host import SharedHostTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """The shelves of one backend, by pool, and the relay that tells of the KV pool's."""

    shelves: Mapping[str, Shelf]
    relay: EventRelay

    def close(self) -> None:
        """Close the shelves; the relay goes on, and tells that this process's disk is out of reach."""
        for shelf in self.shelves.values():
            shelf.close()
        self.relay.publish([TierCleared((Tier.DISK,))])


def page_bytes_of(pool: Any, *, zero_copy: bool) -> int:
    """Return the bytes of one page, as it lies in the pool's memory or as the flat tensor that SGLang makes of it.

    Raises ``ValueError`` for a pool whose layout keeps no page's bytes together.
    """
    if not zero_copy:
        flat = pool.get_dummy_flat_data_page()
        return int(flat.numel() * flat.element_size())
    try:
        (pieces,) = pages_at(pool, np.arange(pool.page_size), 1)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"keepwarm cannot reach the pages of {type(pool).__name__} with layout {getattr(pool, 'layout', None)!r}: "
            f"{error}; choose another --hicache-mem-layout (page_first, page_first_direct)"
        ) from error
    return sum(len(piece) for piece in pieces)


def open_shelves(
    pools: Mapping[str, Any], options: PluginOptions, shard: Shard, facts: EngineFacts, *, zero_copy: bool
) -> Opened:
    """Open every tier for every pool. Media that cannot be opened are left out, loudly. Raises ``ValueError`` where it
    cannot be told what the weights are, and ``zmq.ZMQError`` where an event port is taken."""
    identity = options.weights_id or _digest_of(options, facts)
    relay = _relay(options, shard, facts)
    if not IS_COMPILED:
        log.warning("keepwarm: no compiled kernels here; pages are copied and hashed in two passes instead of one")
    sizes = {name: page_bytes_of(pool, zero_copy=zero_copy or name != "kv") for name, pool in pools.items()}
    whole = sum(sizes.values()) * shard.ranks * facts.dp_size
    shelves = {}
    for name, pool in pools.items():
        layout = page_layout(
            pool,
            name,
            page_bytes=sizes[name],
            weights_id=identity,
            namespace=options.namespace,
            shard=shard,
            facts=facts,
            zero_copy=zero_copy,
        )
        place = _Place(layout, name, sizes[name] / whole, options, shard, facts)
        tell = _teller(relay, layout) if name == "kv" and shard.is_first else None
        is_waiting = relay.follows and name == "kv"
        shelf = Shelf(layout, place.tiers(tell), relay.book, place.limits(is_waiting_for_tokens=is_waiting))
        if tell is not None:
            relay.book.blocks = max(relay.book.blocks, 2 * getattr(pool, "page_num", 0))
            shelf.announce(options.announce_pages)
        shelves[name] = shelf
    return Opened(shelves, relay)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the pages of one pool go; ``share``: of what the server may have."""

    layout: PageLayout
    name: str
    share: float
    options: PluginOptions
    shard: Shard
    facts: EngineFacts

    @property
    def writes(self) -> bool:
        return self.shard.writes or self.name in RANK_SHARDED

    @property
    def host_bytes(self) -> int:
        return int(self.options.host_bytes(writes=self.writes) * self.share)

    @property
    def retention(self) -> RetentionRules:
        return self.options.retention(self.share)

    def limits(self, *, is_waiting_for_tokens: bool) -> ShelfOptions:
        """Return the limits of the shelf."""
        options = self.options
        return ShelfOptions(
            get_s=options.allowance,
            worth=options.worth,
            is_waiting_for_tokens=is_waiting_for_tokens,
            writes=self.writes,
            promotes=options.host_gb > 0,
            behind_bytes=self.host_bytes,
        )

    def tiers(self, tell: OnChange | None) -> list[PageTier]:
        """Open host, disk and pool, those that there are."""
        tiers: list[PageTier] = []
        if self.host_bytes >= self.layout.page_bytes:
            tiers.append(self._host())
        if (disk := self._disk()) is not None:
            disk.on_change = tell
            tiers.append(disk)
        pool_bytes = int(self.options.pool_bytes * self.share)
        if self.options.pool is not None and pool_bytes >= self.layout.page_bytes:
            pool = PoolTier(
                self.layout,
                self.options.pool,
                capacity_bytes=pool_bytes,
                on_change=tell,
                retention=self.retention,
                options=PoolOptions(read_s=self.options.allowance),
            )
            tiers.append(pool)
        return tiers

    def _host(self) -> PageTier:
        """Open the buffer. Pages have no names in it yet (see ``Shelf``), so they live there as briefly as any may, and
        no quota counts them."""
        brief = RetentionRules(Retention(ttl_s=self.retention.shortest_ttl_s))
        socket = self.options.host_path
        if socket is None:
            return HostTier(self.layout, capacity_bytes=self.host_bytes, retention=brief)
        limits = SharedHostOptions(ask_s=self.options.allowance)
        return SharedHostTier(self.layout, socket, capacity_bytes=self.host_bytes, retention=brief, options=limits)

    def _disk(self) -> DiskTier | None:
        folder, folder_bytes = self.options.disk_path, self.options.disk_bytes
        if folder is None:
            return None
        if self.shard.is_mla and self.shard.tp_size > 1:
            log.warning("keepwarm: no disk tier: one rank writes what all read, and a disk has one owner; use a pool")
            return None
        name = f"{self.layout.fingerprint.hex()}-{self.facts.dp_rank}"
        try:
            path, room = claim_disk(folder, name, int(folder_bytes * self.share), folder_bytes)
            return DiskTier(
                self.layout,
                path,
                capacity_bytes=room,
                retention=self.retention,
                options=DiskOptions(read_s=self.options.allowance),
            )
        except MediumError as error:
            log.error("keepwarm: no disk tier: %s", error)
            return None


def _teller(relay: EventRelay, layout: PageLayout) -> OnChange:
    def tell(change: TierChange) -> None:
        if isinstance(change, PagesStored):
            named = tuple((key, meta) for key, meta in change.pages if meta.token_ids)
            change = PagesStored(change.tier, named)
        relay.publish(tier_events(change, layout.page_tokens))

    return tell


def _relay(options: PluginOptions, shard: Shard, facts: EngineFacts) -> EventRelay:
    """Return the process's relay: it publishes on one rank of each replica, as the engine does."""
    events = facts.events if options.engine_events is None else EngineEvents(options.engine_events, None)
    publish = None
    if options.events is not None and shard.is_first:
        host, port = host_and_port(options.events)
        first = port + 2 * facts.dp_rank
        publish = PublisherOptions(host=host, port=first, replay_port=first + 1)
        if events is None:
            log.warning("keepwarm: the engine publishes no events: pages have no tokens and cannot be announced")
    return relay_for(events if shard.is_first else None, publish)


def _digest_of(options: PluginOptions, facts: EngineFacts) -> str:
    folder = None if facts.model_path is None else local_model(facts.model_path)
    if folder is None:
        raise ValueError(f"keepwarm finds no files of {facts.model_path!r}: say 'weights_id' what the weights are")
    base = (
        options.disk_path if options.disk_path is not None else Path(tempfile.gettempdir()) / f"keepwarm-{os.getuid()}"
    )
    try:
        return weights_digest(folder, base / "weights-ids.json")
    except OSError as error:
        raise ValueError(f"keepwarm cannot read the weights in {folder}: {error}; or give 'weights_id'") from error
