"""One engine's life in its process: start, warm up, serve, drain, end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket

from aiohttp import web

from engine_adapter.embedded.assembly import Assembly, assemble
from engine_adapter.embedded.chat import read_completion
from engine_adapter.embedded.options import EngineConfig

_log = logging.getLogger(__name__)
_WARM_UP = b'{"prompt": "warm up", "temperature": 0, "max_tokens": 2, "rid": "warm-up"}'


def run(config: EngineConfig, listener: socket.socket) -> None:
    """Serve on the bound ``listener`` until SIGTERM or SIGINT. Raises as ``assemble``."""
    asyncio.run(_serve(assemble(config), listener))


async def _serve(assembly: Assembly, listener: socket.socket) -> None:
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


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        raise SystemExit(1)
    stop.set()


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
