"""SGLang's HiCache storage calls, answered from this store.

``Backend`` has the methods of ``sglang.srt.mem_cache.hicache_storage.HiCacheStorage`` and imports nothing of SGLang or
torch; ``hicache.Keepwarm`` is both. Read: 0.5.23. Called at the start in this order: ``register_mem_pool_host``,
``register_mem_host_pool_v2`` for each pool, ``on_host_pools_registered``; then by one thread each for looking up,
reading and writing, all at the same time. A configuration that is wrong raises at the start; later every fault is a
miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.events import TierCleared
from kvstore.fetching import BufferTarget, Target
from kvstore.page import Tier
from kvstore.plugins.sglang.engine import EngineFacts, read_engine_facts, weights_version
from kvstore.plugins.sglang.identity import read_shard
from kvstore.plugins.sglang.memory import Pieces, PiecesTarget, pages_at, tensor_memory
from kvstore.plugins.sglang.opening import Opened, open_shelves, page_bytes_of
from kvstore.plugins.sglang.options import read_options
from kvstore.plugins.sglang.shelf import Shelf

log = logging.getLogger(__name__)

KV = "kv"
_REMEMBERED_QUERIES = 1024
_LEAST_LEARNED_TOKENS = 64


@dataclass(slots=True)
class TransferStats:
    """What SGLang's own metrics want to know, since they were asked for last: pages and GB/s of each transfer."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PoolHits:
    """The answer to ``batch_exists_v2``; ``hicache`` makes SGLang's own class of it."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int]


class Backend:
    """One scheduler process's storage."""

    def __init__(
        self,
        storage_config: Any,
        kwargs: Mapping[str, object] | None = None,
        *,
        facts: EngineFacts | None = None,
        version: Callable[[], str] | None = None,
    ) -> None:
        """``kwargs`` is an empty mapping that SGLang passes by position. ``facts`` of the engine and the ``version``
        of its weights are asked of the SGLang in this process. Raises ``ValueError`` for wrong options."""
        self.options = read_options(storage_config.extra_config)
        self.shard = read_shard(storage_config)
        self.facts = facts if facts is not None else read_engine_facts()
        self._version = version if version is not None else weights_version()
        self._opened_for = self._version()
        self.is_zero_copy = bool((storage_config.extra_config or {}).get("interface_v1"))
        self.mem_pool_host: Any = None
        self.registered_pools: dict[Any, Any] = {}
        self._opened: Opened | None = None
        self._opening = threading.Lock()
        self._stats = TransferStats()
        self._stats_lock = threading.Lock()
        self._has_left = False
        self._queried: OrderedDict[str, tuple[float, int]] = OrderedDict()  # last key of a miss → when, tokens

    # --- the start and the end ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the KV cache itself. Raises ``ValueError`` for one whose memory cannot be reached."""
        page_bytes_of(mem_pool_host, zero_copy=self.is_zero_copy)
        self._begin_anew()
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool by name: ``kv`` again, or one beside it. Raises ``ValueError`` as above."""
        name = str(host_pool_name)
        if name != KV:
            page_bytes_of(host_pool, zero_copy=True)
            self._close_shelves()  # one that comes later: opened with the others at the next call
        self.registered_pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """All pools are known: open the tiers."""
        self._shelf(KV)

    def close(self) -> None:
        """Let go of everything; SGLang calls it when the storage is detached. Idempotent."""
        self._close_shelves()
        self.mem_pool_host = None
        self.registered_pools = {}

    def clear(self) -> None:
        """Forget every page of this server's layouts; what the pool has of them, for all servers.

        After weights were changed in place the server begins anew with it, under another fingerprint.
        """
        if self._opened is not None and self.shard.writes:
            for shelf in self._opened.shelves.values():
                shelf.clear()
        self._begin_anew()

    # --- looking up ---

    def exists(self, key: str) -> bool:
        """See ``batch_exists``."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages there are that come sooner than they could be computed."""
        shelf = self._shelf(KV)
        if shelf is None or not keys:
            return 0
        asked_s = time.monotonic()
        claimed = shelf.claim(keys)
        if not claimed:
            self._note_query(keys, asked_s, shelf)
        return claimed

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return the leading pages that can be restored with all that the model keeps beside them.

        ``all_pages``: the side pool must have every page; ``trailing_pages``: the last ones of a prefix; other policies
        get no verdict.
        """
        kv_pages = self.batch_exists(keys)
        hits = {KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            name, policy = str(transfer.name), str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if name == KV or policy not in ("all_pages", "trailing_pages"):
                continue
            shelf = self._shelf(name)
            there = [False] * kv_pages if shelf is None else shelf.present(keys[:kv_pages])
            trailing = 0 if policy == "all_pages" else max(1, len(transfer.keys or ()))
            usable = _restorable(there, trailing)
            if usable:
                hits[name] = usable[-1]
            allowed = set(usable)
            restorable = [pages for pages in restorable if pages in allowed]
        return PoolHits(restorable[-1] if restorable else 0, hits, restorable)

    # --- reading ---

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill the host pool's own memory."""
        return self._read_pieces(KV, keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Fill the memory of several pools, each in one call."""
        return {each.name: self._read_pieces(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """See ``batch_get``; one page."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill flat tensors; ``None`` in the place of each that was not."""
        shelf = self._shelf(KV)
        if shelf is None or target_locations is None:
            return [None] * len(keys)
        found = self._get(shelf, keys, BufferTarget([tensor_memory(tensor) for tensor in target_locations]))
        return [tensor if done else None for tensor, done in zip(target_locations, found, strict=True)]

    # --- writing ---

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages straight from the host pool's memory."""
        return self._write_pieces(KV, keys, host_indices)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools."""
        return {each.name: self._write_pieces(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """See ``batch_set``; one page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat tensors; whether all of them are stored."""
        shelf = self._shelf(KV)
        if shelf is None or values is None:
            return False
        whole = [value.contiguous() for value in values]  # they live as long as this call
        return all(self._put(shelf, keys, [[tensor_memory(value)] for value in whole]))

    # --- figures ---

    def take_stats(self) -> TransferStats:
        """Return what was moved since this was last called."""
        with self._stats_lock:
            taken, self._stats = self._stats, TransferStats()
        return taken

    def get_stats(self) -> Any:
        """See ``take_stats``; ``hicache`` makes SGLang's own class of it."""
        return self.take_stats()

    @property
    def shelves(self) -> Mapping[str, Shelf]:
        """The pools that are open, by name."""
        return {} if self._opened is None else self._opened.shelves

    # --- what they share ---

    def _is_outdated(self) -> bool:
        """Tell whether pages that are open are of weights that no longer run."""
        return self._version() != self._opened_for

    def _begin_anew(self) -> None:
        """Let go of what was opened for weights that no longer run."""
        if self._is_outdated():
            self._close_shelves()
            self._opened_for = self._version()

    def _leave(self) -> None:
        """Say once that nothing is stored or served any more, and that this server's disk is out of reach."""
        if self._has_left:
            return
        self._has_left = True
        log.error(
            "keepwarm: the weights were changed in place (%r, were %r): nothing of this storage is used until it is "
            "cleared or attached anew", self._version(), self._opened_for,
        )  # fmt: skip
        if self._opened is not None:
            self._opened.relay.publish([TierCleared((Tier.DISK,))])

    def _shelf(self, name: str) -> Shelf | None:
        if self._is_outdated():
            self._leave()
            return None
        self._has_left = False
        opened = self._opened
        if opened is None and self.mem_pool_host is not None:
            with self._opening:
                if self._opened is None:
                    pools = {KV: self.mem_pool_host} | self.registered_pools
                    self._opened = open_shelves(
                        pools, self.options, self.shard, self._facts_now(), zero_copy=self.is_zero_copy
                    )
                opened = self._opened
        return None if opened is None else opened.shelves.get(name)

    def _facts_now(self) -> EngineFacts:
        if not self._opened_for:
            return self.facts
        return replace(self.facts, settings={**self.facts.settings, "weights": self._opened_for})

    def _close_shelves(self) -> None:
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _pieces(self, name: str, keys: Sequence[str], host_indices: Any) -> list[list[memoryview]] | None:
        """Return where the pages of a pool lie; ``None`` when there are not as many token slots as the keys need."""
        pool = self.mem_pool_host if name == KV else self.registered_pools.get(name)
        if pool is None or not keys:
            return None
        if host_indices is None or len(host_indices) != len(keys) * pool.page_size:
            log.error("keepwarm: %s slots of pool %s for %d keys", _length(host_indices), name, len(keys))
            return None
        return pages_at(pool, host_indices, len(keys))

    def _read_pieces(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        shelf, pieces = self._shelf(name), self._pieces(name, keys, host_indices)
        if shelf is None or pieces is None:
            return [False] * len(keys)
        return self._get(shelf, keys, PiecesTarget(pieces))

    def _write_pieces(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        shelf, pieces = self._shelf(name), self._pieces(name, keys, host_indices)
        if shelf is None or pieces is None:
            return [False] * len(keys)
        return self._put(shelf, keys, pieces)

    def _get(self, shelf: Shelf, keys: Sequence[str], target: Target) -> list[bool]:
        began_s = time.monotonic()
        found = shelf.get(keys, target)
        took_s = time.monotonic() - began_s
        with self._stats_lock:
            self._stats.prefetch_pgs.append(sum(found))
            self._stats.prefetch_bandwidth.append(sum(found) * shelf.page_bytes / 1e9 / max(took_s, 1e-9))
        return found

    def _put(self, shelf: Shelf, keys: Sequence[str], pages: Sequence[Pieces]) -> list[bool]:
        began_s = time.monotonic()
        self._learn_prefill(keys, began_s, shelf)
        stored = shelf.put(keys, pages)
        took_s = time.monotonic() - began_s
        with self._stats_lock:
            self._stats.backup_pgs.append(sum(stored))
            self._stats.backup_bandwidth.append(sum(stored) * shelf.page_bytes / 1e9 / max(took_s, 1e-9))
        return stored

    def _note_query(self, keys: Sequence[str], asked_s: float, shelf: Shelf) -> None:
        """Remember a prompt of which nothing was claimed: when its last page is stored, it has been computed."""
        tokens = len(keys) * shelf.page_tokens
        if tokens < _LEAST_LEARNED_TOKENS:
            return
        with self._stats_lock:
            self._queried[keys[-1]] = (asked_s, tokens)
            while len(self._queried) > _REMEMBERED_QUERIES:
                self._queried.popitem(last=False)

    def _learn_prefill(self, keys: Sequence[str], now_s: float, shelf: Shelf) -> None:
        with self._stats_lock:
            known = [self._queried.pop(key) for key in keys if key in self._queried]
        for asked_s, tokens in known:
            shelf.computed(tokens, now_s - asked_s)


def _restorable(there: Sequence[bool], trailing: int) -> list[int]:
    """Return the lengths of prefixes that a side pool restores: all pages there, or the last ``trailing`` of them."""
    if not trailing:
        whole = there.index(False) if False in there else len(there)
        return list(range(1, whole + 1))
    return [end for end in range(1, len(there) + 1) if all(there[max(0, end - trailing) : end])]


def _length(host_indices: Any) -> int:
    return 0 if host_indices is None else len(host_indices)
