"""Ports for processes that are told where to listen."""

from __future__ import annotations

import socket

from engine_adapter.embedded.launch import free_port


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses at this moment, each once."""
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)


def two_free_ports() -> int:
    """Return a port that nobody uses at this moment, as nobody does the one after it."""
    while True:
        port = free_port()
        with socket.socket() as second:
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
