"""What SGLang loads: ``module_path`` is this module, ``class_name`` is ``Keepwarm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.mem_cache import hicache_storage

from kvstore.plugins.sglang.backend import Backend


class Keepwarm(Backend, hicache_storage.HiCacheStorage):  # type: ignore[misc]  # not installed where types are checked
    """See ``Backend``."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, object] | None = None) -> None:
        Backend.__init__(self, storage_config, kwargs)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """See ``Backend``."""
        hits = super().batch_exists_v2(keys, pool_transfers, extra_info)
        return hicache_storage.PoolTransferResult(
            hits.kv_hit_pages, hits.extra_pool_hit_pages, hits.restorable_prefix_pages
        )

    def get_stats(self) -> Any:
        """See ``Backend``."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        taken = self.take_stats()
        return StorageMetrics(
            prefetch_pgs=taken.prefetch_pgs,
            backup_pgs=taken.backup_pgs,
            prefetch_bandwidth=taken.prefetch_bandwidth,
            backup_bandwidth=taken.backup_bandwidth,
        )
