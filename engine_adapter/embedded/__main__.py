"""``python -m engine_adapter.embedded``: one engine in its own process, until SIGTERM or SIGINT.

Standard output carries one line of JSON when the engine is ready: ``{"event": "ready", "url": …, "kv_events_port": …,
"kv_replay_port": …}``. At the end running requests get time to finish and pages to reach the lower tiers; a second
signal ends at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys

from aiohttp import web

from engine_adapter.embedded.assembly import Assembly, assemble
from engine_adapter.embedded.chat import read_completion
from engine_adapter.embedded.errors import EngineError
from engine_adapter.embedded.options import ConfigError, EngineConfig, read_config
from engine_adapter.prompt import TemplateError
from kvstore.errors import StoreError

_log = logging.getLogger("engine_adapter.embedded")
_WARM_UP = b'{"prompt": "warm up", "temperature": 0, "max_tokens": 2, "rid": "warm-up"}'


def main() -> int:
    """Run the engine; return the exit status."""
    try:
        config = read_config()
    except ConfigError as error:
        print(f"wrong configuration: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        listener = _bind(config)  # before the long part, so that a port that is taken shows at once
        assembly = assemble(config)
        return asyncio.run(_serve(assembly, listener))
    except (EngineError, TemplateError, StoreError, OSError) as error:
        _log.error("cannot start: %s", error)
        return 1


async def _serve(assembly: Assembly, listener: socket.socket) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    runner = web.AppRunner(assembly.server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    try:
        await asyncio.to_thread(assembly.start)
        await assembly.service.warm_up(read_completion(_WARM_UP))
        assembly.server.open()
        _tell_ready(assembly, listener)
        await stop.wait()
        if not await assembly.server.drain(assembly.config.drain_s):
            _log.warning("requests still ran after %g s and are cut off", assembly.config.drain_s)
    finally:
        await asyncio.to_thread(assembly.close)
        await runner.cleanup()
    return 0


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        raise SystemExit(1)
    stop.set()


def _bind(config: EngineConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.host, config.port))
    return listener


def _tell_ready(assembly: Assembly, listener: socket.socket) -> None:
    publisher = assembly.publisher
    ready = {
        "event": "ready",
        "url": f"http://{assembly.config.host}:{listener.getsockname()[1]}",
        "kv_events_port": publisher.port if publisher else None,
        "kv_replay_port": publisher.replay_port if publisher else None,
    }
    print(json.dumps(ready), flush=True)
    _log.info("ready at %s", ready["url"])


if __name__ == "__main__":
    sys.exit(main())
