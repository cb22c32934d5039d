"""What an operator writes into ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

_GB = 1_000_000_000


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where pages go, and within which limits. Sizes are of the whole server: its ranks share them evenly."""

    disk: str | None = None  # a folder
    disk_gb: float = 0.0
    pool: str | None = None  # a URL; see kvstore.tiers.pool_url
    pool_gb: float = 64.0  # what this server puts there; the pool's own maxmemory bounds all together
    host_gb: float = 1.0  # memory: what pages are written behind from, and a tier that costs a copy
    namespace: str = ""  # servers share pages only within one
    weights_id: str | None = None  # else the digest of the model's files
    prefill_tokens_per_s: float | None = None  # else learned
    claim_margin: float = 1.0  # how many times as long computing must take for a page to be claimed
    deadline_ms: float = 100.0  # of one load, besides what its bytes take
    least_mb_per_s: float = 100.0  # a medium slower than this is late
    announce_pages: int = 100_000  # of each tier, told after a start

    @property
    def disk_bytes(self) -> int:
        """See ``disk_gb``."""
        return int(self.disk_gb * _GB) if self.disk is not None else 0

    @property
    def pool_bytes(self) -> int:
        """See ``pool_gb``."""
        return int(self.pool_gb * _GB) if self.pool is not None else 0

    @property
    def host_bytes(self) -> int:
        """See ``host_gb``."""
        return int(self.host_gb * _GB)

    @property
    def disk_path(self) -> Path | None:
        """See ``disk``."""
        return None if self.disk is None else Path(self.disk).expanduser()


def read_options(extra_config: Mapping[str, object]) -> ConnectorOptions:
    """Return the options of a connector. Raises ``ValueError`` that says what is wrong with them."""
    try:
        options = msgspec.convert(dict(extra_config), ConnectorOptions)
    except msgspec.ValidationError as error:
        raise ValueError(f"keepwarm's options in kv_connector_extra_config: {error}") from error
    if options.disk is not None and options.disk_gb <= 0:
        raise ValueError("keepwarm: 'disk' needs 'disk_gb', the size that the folder may have")
    if options.host_gb <= 0:
        raise ValueError("keepwarm: 'host_gb' must be positive: pages are written behind from there")
    if min(options.pool_gb, options.deadline_ms) < 0 or options.least_mb_per_s <= 0:
        raise ValueError("keepwarm: sizes and times cannot be negative")
    if options.claim_margin <= 0 or (options.prefill_tokens_per_s or 1.0) <= 0:
        raise ValueError("keepwarm: 'claim_margin' and 'prefill_tokens_per_s' must be positive")
    return options
