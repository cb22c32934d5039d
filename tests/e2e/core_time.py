"""Who ran, who waited for a core, and how long an event loop stood still: what a pause on a small machine is made of.

Linux tells each thread's time on a core and in the queue for one (``/proc/PID/task/TID/schedstat``, ns).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

_LOOK_S = 0.005


@dataclass
class CoreTime:
    """What was found between the beginning and the end of ``measured``; seconds."""

    ran_s: dict[str, float] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    longest_stall_s: float = 0.0

    def told(self) -> dict[str, object]:
        """Return it for people."""
        shares = {
            name: {"on a core": _share(self.ran_s[name], self.took_s), "waiting for one": _share(waited, self.took_s)}
            for name, waited in self.waited_s.items()
        }
        return {
            "seconds": round(self.took_s, 1),
            "this loop stood still for, s": round(self.longest_stall_s, 3),
            **shares,
        }


@asynccontextmanager
async def measured(pids: Mapping[str, int]) -> AsyncIterator[CoreTime]:
    """Measure these processes, and this loop, while the block runs. A process that ends counts until then."""
    found, began_s = CoreTime(), time.monotonic()
    before = {name: _schedstat(pid) for name, pid in pids.items()}
    looking = asyncio.create_task(_look(found))
    try:
        yield found
    finally:
        looking.cancel()
        found.took_s = time.monotonic() - began_s
        for name, pid in pids.items():
            ran, waited = _schedstat(pid)
            found.ran_s[name] = max(ran - before[name][0], 0) / 1e9
            found.waited_s[name] = max(waited - before[name][1], 0) / 1e9


async def _look(found: CoreTime) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        found.longest_stall_s = max(found.longest_stall_s, loop.time() - due_s)


def _schedstat(pid: int) -> tuple[int, int]:
    """Return the nanoseconds that a process' threads ran, and waited to run; nothing of one that is gone."""
    ran = waited = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            on_core, in_queue, _ = file.read_text().split()
        except (OSError, ValueError):
            continue
        ran, waited = ran + int(on_core), waited + int(in_queue)
    return ran, waited


def _share(part_s: float, whole_s: float) -> float:
    return round(part_s / max(whole_s, 1e-9), 2)
