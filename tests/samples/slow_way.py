"""A way to a pool that can be made slow: a TCP proxy whose answers take as long as it is told."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

_PART_BYTES = 1 << 16


class SlowWay:
    """Forwards one loopback port to another. ``bytes_per_s`` and ``latency_s`` hold for answers, from now on."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.bytes_per_s: float | None = None
        self.latency_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target_port), timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        free_s = 0.0  # when all that was sent before has gone through
        with suppress(OSError):
            while data := source.recv(_PART_BYTES):
                if is_answer:
                    took_s = len(data) / self.bytes_per_s if self.bytes_per_s else 0.0
                    free_s = max(free_s, time.monotonic() + self.latency_s) + took_s
                    time.sleep(max(0.0, free_s - time.monotonic()))
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
