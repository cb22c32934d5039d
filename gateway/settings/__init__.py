"""The one settings file, strict: a name that is not known stops the start and is told with its path and its source.

Sources, the first that has a value wins: command-line flags, environment (``KEEPWARM_SERVER__PORT=8400``), the TOML
file, the defaults here. With no file at all keepwarm serves its embedded engine. Relative paths in the file are
relative to the folder it lies in.

State (ledger, traces, disk tiers, logs) lies in ``home``: ``$KEEPWARM_HOME``, by default
``~/.keepwarm``. It is not a cache folder, since the ledger must not be swept away with caches. One gateway at a time
uses a home.

Only the composition root sees these objects; every other module is given its own small frozen options.
"""

from gateway.settings.callers import KeySettings
from gateway.settings.engines import Adapter, EngineSettings, InstanceSettings, KvEventSettings
from gateway.settings.loading import CONFIG_VARIABLE, is_loopback, load_settings, read_instances
from gateway.settings.serving import AdmissionSettings, LogSettings
from gateway.settings.whole import Settings

__all__ = [
    "CONFIG_VARIABLE",
    "Adapter",
    "AdmissionSettings",
    "EngineSettings",
    "InstanceSettings",
    "KeySettings",
    "KvEventSettings",
    "LogSettings",
    "Settings",
    "is_loopback",
    "load_settings",
    "read_instances",
]
