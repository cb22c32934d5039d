"""What an operator writes into ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

_SGLANG_OWN = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(\d+)")
_GB = 1_000_000_000


class PluginOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where pages go, and within which limits. Sizes are of the whole server: its ranks share them evenly."""

    disk: str | None = None  # a folder
    disk_gb: float = 0.0
    pool: str | None = None  # a URL; see kvstore.tiers.pool_url
    pool_name: str | None = None  # for the gateway, where servers reach one pool by different URLs
    pool_gb: float = 64.0  # what this server puts there; the pool's own maxmemory bounds all together
    buffer_gb: float = 0.25  # memory for pages on their way to disk and pool: writes return at once
    host_gb: float = 0.0  # more of it, as a tier besides SGLang's own; pays with buffer_only
    namespace: str = ""  # servers share pages only within one
    weights_id: str | None = None  # else the digest of the model's files
    events: str | None = None  # tcp://HOST:PORT, and the port after it for replays; HOST may be *
    engine_events: str | None = None  # where the engine publishes, if its own arguments do not tell
    prefill_tokens_per_s: float | None = None  # else learned
    claim_margin: float = 1.0  # how many times as long computing must take for a page to be claimed
    deadline_ms: float = 100.0  # of one call, besides what its bytes take
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

    def host_bytes(self, *, writes: bool) -> int:
        """See ``host_gb``, and for those who write ``buffer_gb``."""
        return int((self.host_gb + (self.buffer_gb if writes else 0.0)) * _GB)

    @property
    def disk_path(self) -> Path | None:
        """See ``disk``."""
        return None if self.disk is None else Path(self.disk).expanduser()


def read_options(extra_config: Mapping[str, object] | None) -> PluginOptions:
    """Return the options in SGLang's extra configuration. Raises ``ValueError`` that says what is wrong with them."""
    ours = {name: value for name, value in (extra_config or {}).items() if name not in _SGLANG_OWN}
    try:
        options = msgspec.convert(ours, PluginOptions)
    except msgspec.ValidationError as error:
        raise ValueError(f"keepwarm's options in hicache-storage-backend-extra-config: {error}") from error
    if options.disk is None and options.pool is None and not options.host_gb:
        raise ValueError("keepwarm has nowhere to keep pages: give 'disk' with 'disk_gb', 'pool', or both")
    if options.disk is not None and options.disk_gb <= 0:
        raise ValueError("keepwarm: 'disk' needs 'disk_gb', the size that the folder may have")
    if min(options.pool_gb, options.host_gb, options.buffer_gb, options.deadline_ms) < 0 or options.least_mb_per_s <= 0:
        raise ValueError("keepwarm: sizes and times cannot be negative")
    if options.claim_margin <= 0 or (options.prefill_tokens_per_s or 1.0) <= 0:
        raise ValueError("keepwarm: 'claim_margin' and 'prefill_tokens_per_s' must be positive")
    for endpoint in (options.events, options.engine_events):
        if endpoint is not None:
            host_and_port(endpoint)
    return options


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Take ``tcp://HOST:PORT`` apart. Raises ``ValueError``."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not 0 < int(found[2]) < 65_535:
        raise ValueError(f"keepwarm: {endpoint!r} is not of the form tcp://HOST:PORT")
    return found[1], int(found[2])
