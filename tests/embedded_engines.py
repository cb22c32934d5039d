"""Embedded engines as processes of their own, which a gateway is pointed at as at anybody's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from engine_adapter.embedded.launch import EmbeddedProcess, LaunchSpec, free_port

READY_LIMIT_S = 240


@asynccontextmanager
async def engines(folder: Path, count: int) -> AsyncIterator[list[str]]:
    """Run so many embedded engines without a pool and yield their URLs once they are warm."""
    processes = []
    for number in range(count):
        arguments = ("--device-tokens", "6144", "--host-bytes", "256MiB", "--disk-path", str(folder / f"disk-{number}"),
                     "--disk-bytes", "512MiB", "--threads", str(os.cpu_count() or 1))  # fmt: skip
        spec = LaunchSpec(f"engine-{number}", free_port(), folder / f"engine-{number}.log", arguments)
        processes.append(EmbeddedProcess(spec))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(process.run(lambda: False)) for process in processes]
        try:
            async with aiohttp.ClientSession() as session, asyncio.timeout(READY_LIMIT_S):
                for process in processes:
                    while not await healthy(session, process.spec.url):  # noqa: ASYNC110 - another process
                        await asyncio.sleep(0.2)
            yield [process.spec.url for process in processes]
        finally:
            for process in processes:
                await process.stop()
            await asyncio.gather(*tasks)


async def healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
