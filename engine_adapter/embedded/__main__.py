"""``python -m engine_adapter.embedded``: one engine in its own process, until SIGTERM or SIGINT.

Standard output carries one line of JSON when the engine is ready: ``{"event": "ready", "url": …, "kv_events_port": …,
"kv_replay_port": …}``. At the end running requests get time to finish and pages to reach the lower tiers; a second
signal ends at once. Status 2 is a wrong configuration, 1 an engine that cannot start.
"""

from __future__ import annotations

import logging
import socket
import sys

import zmq

from engine_adapter.embedded.errors import EngineError
from engine_adapter.embedded.options import ConfigError, EngineConfig, read_config
from engine_adapter.prompt_errors import TemplateError
from kvstore.errors import StoreError

_log = logging.getLogger("engine_adapter.embedded")


def main() -> int:
    """Run the engine; return the exit status."""
    try:
        config = read_config()
    except ConfigError as error:
        print(f"wrong configuration: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        listener = _bind(config)
        # Only now, since torch takes seconds to load: a wrong flag or a port that is taken shows at once.
        from engine_adapter.embedded.process import run

        run(config, listener)
    except (EngineError, TemplateError, StoreError, OSError, zmq.ZMQError) as error:
        _log.error("cannot start: %s", error)
        return 1
    return 0


def _bind(config: EngineConfig) -> socket.socket:
    """Take the port; nobody can connect until it is listened on."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.host, config.port))
    return listener


if __name__ == "__main__":
    sys.exit(main())
