"""Long work on the event loop, in turns: others have theirs after every few milliseconds of it."""

from __future__ import annotations

import asyncio
import time

TURN_S = 0.002


class Turns:
    """One piece of long work. ``give`` may be called as often as one likes: it costs a tenth of a microsecond or two
    until the turn is over."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    async def give(self) -> None:
        """Let others run, if this turn has been long enough."""
        if time.perf_counter() - self._began_s >= TURN_S:
            await asyncio.sleep(0)
            self._began_s = time.perf_counter()
