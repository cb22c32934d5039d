"""What an operator writes into ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.plugins.store_options import GB, StoreOptions, read_store_options


class ConnectorOptions(StoreOptions, frozen=True, kw_only=True):
    """Where pages go, and within which limits."""

    host_gb: float = 1.0  # memory: what pages are written behind from, and a tier that costs a copy

    @property
    def host_bytes(self) -> int:
        """See ``host_gb``."""
        return int(self.host_gb * GB)


def read_options(extra_config: Mapping[str, object]) -> ConnectorOptions:
    """Return the options of a connector. Raises ``ValueError`` that says what is wrong with them."""
    options = read_store_options(ConnectorOptions, extra_config, "kv_connector_extra_config")
    if options.host_gb <= 0:
        raise ValueError("keepwarm: 'host_gb' must be positive: pages are written behind from there")
    return options
