"""What an operator writes into ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvstore.plugins.store_options import GB, StoreOptions, read_store_options

_SGLANG_OWN = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(\d+)")


class PluginOptions(StoreOptions, frozen=True, kw_only=True):
    """Where pages go, and within which limits."""

    pool_name: str | None = None  # for the gateway, where servers reach one pool by different URLs
    buffer_gb: float = 0.25  # memory for pages on their way to disk and pool: writes return at once
    host_gb: float = 0.0  # more of it, as a tier besides SGLang's own; pays with buffer_only
    events: str | None = None  # tcp://HOST:PORT, and the port after it for replays; HOST may be *
    engine_events: str | None = None  # where the engine publishes, if its own arguments do not tell

    def host_bytes(self, *, writes: bool) -> int:
        """See ``host_gb``, and for those who write ``buffer_gb``."""
        return int((self.host_gb + (self.buffer_gb if writes else 0.0)) * GB)


def read_options(extra_config: Mapping[str, object] | None) -> PluginOptions:
    """Return the options in SGLang's extra configuration. Raises ``ValueError`` that says what is wrong with them."""
    ours = {name: value for name, value in (extra_config or {}).items() if name not in _SGLANG_OWN}
    options = read_store_options(PluginOptions, ours, "hicache-storage-backend-extra-config")
    if options.disk is None and options.pool is None and not options.host_gb:
        raise ValueError("keepwarm has nowhere to keep pages: give 'disk' with 'disk_gb', 'pool', or both")
    if min(options.host_gb, options.buffer_gb) < 0:
        raise ValueError("keepwarm: sizes and times cannot be negative")
    if options.host_path is not None and options.host_bytes(writes=True) <= 0:
        raise ValueError("keepwarm: 'host_socket' needs 'host_gb', the memory that the servers have in common")
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
