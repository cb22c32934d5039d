"""An engine's load socket (SUB over ZMQ): ``[topic, sequence, payload]``, on every change and at least every second.

Source: SGLang 0.5.23, ``--load-publish-endpoint``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from engine_adapter.load import EngineLoad, LoadSource, decode_load_stat

_NEWEST = 4


async def pushed_loads(source: LoadSource, *, context: zmq.asyncio.Context | None = None) -> AsyncIterator[EngineLoad]:
    """Yield what is published, for ever; an absent publisher is silent. Old news is dropped by ZMQ, not kept."""
    socket = (context or zmq.asyncio.Context.instance()).socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _NEWEST)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        socket.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        socket.connect(source.endpoint)
        while True:
            frames = await socket.recv_multipart()
            if (load := decode_load_stat(frames[-1])) is not None:
                yield load
    finally:
        socket.close(0)
