"""Embedded engines as child processes: started, watched, restarted, stopped. Imports no torch.

Each child listens on one loopback port, which it keeps over restarts, and writes its log to a file of its own. A child
that ends unasked is started again, with growing pauses; one that never became healthy ends the whole start, since what
is wrong with it (no model, no memory, a port that is taken) will not mend itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.errors import LaunchError

_log = logging.getLogger(__name__)
_TAIL_BYTES = 4096
_OWN_PORTS, _PORTS_TRIED = (10_000, 32_000), 1000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One engine to start. ``arguments`` are flags of ``python -m engine_adapter.embedded`` besides host and port."""

    id: str
    port: int
    log_path: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    stop_limit_s: float = 20.0

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self.port}"


class EmbeddedProcess:
    """One engine's process. ``run`` supervises it; ``restart`` and ``stop`` may be called while it does."""

    def __init__(self, spec: LaunchSpec, command: tuple[str, ...] | None = None) -> None:
        """``command`` replaces the engine's own command line (tests)."""
        self.spec = spec
        self._command = command or (
            # -P: what lies in the current folder is not imported
            *(sys.executable, "-P", "-m", "engine_adapter.embedded.guarded", str(os.getpid())),
            "engine_adapter.embedded",
            *("--host", "127.0.0.1", "--port", str(spec.port), *spec.arguments),
        )
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._is_restarting = False

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self, was_ready: Callable[[], bool]) -> None:
        """Keep the engine running until ``stop``. ``was_ready`` tells whether it has ever been healthy.

        Raises ``LaunchError``, with the end of its log, when it ends before that. Cancelling stops it.
        """
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._is_stopping:
                await self._start()
                assert self._process is not None
                code = await self._process.wait()
                if self._is_stopping or self._is_restarting:
                    self._is_restarting, pause_s = False, _FIRST_PAUSE_S
                    continue
                if not was_ready():
                    raise LaunchError(f"engine {self.spec.id} ended with {code}; its log {self._tail()}")
                _log.error("engine %s ended with %d; starting it again in %g s", self.spec.id, code, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            await self.stop()

    async def restart(self) -> None:
        """End the engine as ``stop`` does; ``run`` starts it again."""
        if self.pid is None:
            raise LaunchError(f"engine {self.spec.id} is not running")
        self._is_restarting = True
        await self._end()

    async def stop(self) -> None:
        """End the engine: SIGTERM, so that it writes what it holds to disk, and SIGKILL at the limit. Idempotent."""
        self._is_stopping = True
        await self._end()

    async def _start(self) -> None:
        spec = self.spec
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=None if spec.environment is None else {**os.environ, **spec.environment},
                start_new_session=True,  # the gateway's Ctrl-C is not for it: it is stopped when its requests are over
            )
        _log.info("engine %s started (pid %d, %s, log %s)", spec.id, self._process.pid, spec.url, spec.log_path)

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(self.spec.stop_limit_s):
                await process.wait()
        except TimeoutError:
            _log.warning("engine %s did not end within %g s and is killed", self.spec.id, self.spec.stop_limit_s)
            process.kill()
            await process.wait()
        except ProcessLookupError:
            await process.wait()

    def _tail(self) -> str:
        try:
            data = self.spec.log_path.read_bytes()[-_TAIL_BYTES:]
        except OSError as error:
            return f"{self.spec.log_path} cannot be read: {error.strerror}"
        return f"{self.spec.log_path} ends with:\n{data.decode(errors='replace')}"


def free_port() -> int:
    """Return a loopback port that nobody listened on a moment ago.

    Of those that systems give to no connection by themselves: who will listen there does so later, and again after a
    restart.
    """
    for _ in range(_PORTS_TRIED):
        port = random.randrange(*_OWN_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaunchError("no port is free")
