"""A server that answers late, in pieces, wrongly or not at all: the test's own, since a real one is not so."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvstore.breaker import BreakerOptions
from kvstore.codec import PageHeader, seal
from kvstore.deadline import Allowance
from kvstore.page import PageKey
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_topology import PoolOptions
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data

PAGES = chain(2)
KEYS = [key for key, _ in PAGES]
Answer = Callable[[socket.socket, bytes], None]


class Scripted:
    """Answers everything but GET as a good server does; GET as the test says, one answer after the other."""

    def __init__(self) -> None:
        self.gets: list[Answer] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # whoever asked has gone
            while asked := connection.recv(1 << 16):
                if b"\r\nGET\r\n" in asked:
                    self.gets.pop(0)(connection, asked)
                elif b"PING" in asked:
                    connection.sendall(b"+PONG\r\n")
                elif b"ROLE" in asked:
                    connection.sendall(b"*1\r\n$6\r\nmaster\r\n")
                else:
                    connection.sendall(b"-ERR unknown\r\n")


@pytest.fixture
def server() -> Iterator[Scripted]:
    started = Scripted()
    yield started
    started.close()


def open_tier(server: Scripted, read_s: float = 60.0) -> PoolTier:
    breaker = BreakerOptions(first_probe_s=0.01, longest_probe_s=0.05)
    options = PoolOptions(read_s=Allowance(read_s), breaker=breaker)
    return PoolTier(LAYOUT, server.url, capacity_bytes=8 * LAYOUT.page_bytes, options=options)


def value_of(place: int) -> bytes:
    one = page(PAGES[place])
    header = seal(one.key, PageHeader(one.key, LAYOUT.page_bytes, one.checksum, one.meta))
    return header + bytes(one.data)


def reply(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def reads(tier: PoolTier, keys: list[PageKey]) -> list[bytes | None]:
    out = buffers(len(keys))
    return [bytes(b) if found is not None else None for b, found in zip(out, tier.get(keys, out), strict=True)]


def test_a_value_in_small_pieces_is_put_together(server: Scripted) -> None:
    def dribble(connection: socket.socket, asked: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        whole = reply(value_of(0)) + b"$-1\r\n"
        for start in range(0, len(whole), 97):
            connection.sendall(whole[start : start + 97])

    server.gets.append(dribble)
    tier = open_tier(server)
    assert reads(tier, KEYS) == [page_data(KEYS[0]), None]
    assert tier.stats().alarms == {}
    tier.close()


def test_an_answer_after_the_deadline_reaches_nobody(server: Scripted) -> None:
    gave_up = threading.Event()
    sent = threading.Event()

    def late(connection: socket.socket, asked: bytes) -> None:
        gave_up.wait(60)
        try:
            connection.sendall(reply(value_of(0)))
        finally:
            sent.set()

    server.gets += [late, lambda connection, asked: connection.sendall(reply(value_of(1)))]
    tier = open_tier(server, read_s=0.05)
    assert reads(tier, KEYS[:1]) == [None]
    assert not tier.breaker.closed
    gave_up.set()
    sent.wait(60)
    assert tier.breaker.wait_closed(60)
    tier.options = PoolOptions(read_s=Allowance(60.0))
    assert reads(tier, KEYS[1:]) == [page_data(KEYS[1])]
    tier.close()


def test_a_silence_in_the_middle_of_a_value_costs_one_deadline(server: Scripted) -> None:
    done = threading.Event()

    def half(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(reply(value_of(0))[:2000])
        done.wait(60)

    server.gets.append(half)
    tier = open_tier(server, read_s=0.05)
    assert reads(tier, KEYS[:1]) == [None]
    assert tier.stats().misses == {"unavailable": 1}
    done.set()
    tier.close()


@pytest.mark.parametrize(
    "nonsense",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$abc\r\n", b":5\r\n", b"\r\n", b"$10\r\n12345", b"x" * 100_000],
    ids=["http", "no number", "an integer", "empty", "cut", "no end"],
)
def test_what_is_no_answer_is_a_miss(server: Scripted, nonsense: bytes) -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(nonsense)
        connection.shutdown(socket.SHUT_WR)

    server.gets.append(answer)
    tier = open_tier(server)
    assert reads(tier, KEYS[:1]) == [None]
    assert tier.stats().misses == {"unavailable": 1}
    tier.close()


def test_the_answer_to_another_question_is_a_miss_and_an_alarm(server: Scripted) -> None:
    server.gets.append(lambda connection, asked: connection.sendall(reply(value_of(1)) + reply(value_of(0))))
    tier = open_tier(server)
    assert reads(tier, KEYS) == [None, None]
    assert tier.stats().alarms == {"record": 2}
    tier.close()


def test_a_connection_that_ended_while_idle_is_replaced(server: Scripted) -> None:
    def once(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(b"$-1\r\n")
        connection.shutdown(socket.SHUT_RDWR)

    server.gets += [once, lambda connection, asked: connection.sendall(reply(value_of(0)))]
    tier = open_tier(server)
    assert reads(tier, KEYS[:1]) == [None]
    (idle,) = tier._server._servers.masters()[0]._idle
    while idle.is_quiet:
        pass  # until the end of the connection has arrived
    assert reads(tier, KEYS[:1]) == [page_data(KEYS[0])]
    assert server.connections == 2
    assert tier.breaker.closed
    tier.close()
