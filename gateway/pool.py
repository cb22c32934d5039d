"""A pool server of our own beside the engines that we start: started first, started again when it dies, stopped last.

Engines do without a pool while it is away, so nothing here ends a request or the process.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.tiers.pool_server import PoolServer

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_LONGEST_PAUSE_S = 60.0


async def own_pool(max_bytes: int, stack: AsyncExitStack) -> PoolServer | None:
    """Start a server that lives as long as the stack; ``None``, logged, where that cannot be done."""
    from kvstore.errors import MediumError
    from kvstore.tiers.pool_server import PoolServer

    server = PoolServer(max_bytes=max_bytes)
    try:
        await asyncio.to_thread(server.start)
    except MediumError as error:
        _log.warning("there is no pool tier: %s", error)
        return None
    stack.push_async_callback(asyncio.to_thread, server.stop)
    return server


async def keep_alive(server: PoolServer, *, look_s: float = _LOOK_S) -> None:
    """Start the server again, empty and at its old URL, whenever it ended; for ever. Looks each ``look_s``."""
    from kvstore.errors import MediumError

    pause_s = look_s
    while True:
        await asyncio.sleep(pause_s)
        if server.is_running:
            pause_s = look_s
            continue
        _log.error("the pool server ended; starting it again")
        try:
            await asyncio.to_thread(server.restart)
        except MediumError as error:
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            _log.error("there is no pool tier for %g s: %s", pause_s, error)
