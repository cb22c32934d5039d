"""Traces in PostgreSQL whose server crashes, is away at the start, or will never be a trace store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, make_url, text

from tests.samples.agent_runs import plain_record
from tests.samples.postgres import Server, running
from tracing.errors import TraceStoreError, TraceStoreUnavailable
from tracing.postgres.database import postgres_traces
from tracing.store import TraceStore, TraceStoreOptions

OPTIONS = TraceStoreOptions(max_age_ns=None, queue_records=40, batch_records=10)


@pytest.fixture(scope="module")
def mortal() -> Iterator[Server]:
    """A server of these tests' own, to be killed."""
    with running() as server:
        yield server


def test_what_is_traced_while_the_server_is_away_arrives_when_it_is_back(mortal: Server) -> None:
    store = TraceStore(postgres_traces(mortal.database()), OPTIONS)
    store.append(plain_record("before"))
    assert store.flush(30)
    mortal.kill()
    try:
        for number in range(30):
            store.append(plain_record(f"r{number}"))
        assert not store.flush(60)  # returns as soon as the server is known to be away
        assert store.failure is not None
    finally:
        mortal.start()
    while not store.flush(30):
        pass
    assert store.failure is None
    assert (store.stats().dropped, store.count()) == (0, 31)
    store.check()
    assert store.close()


def test_what_finds_no_room_meanwhile_is_counted_and_nothing_waits(mortal: Server) -> None:
    store = TraceStore(postgres_traces(mortal.database()), OPTIONS)
    assert store.flush(30)
    mortal.kill()
    try:
        for number in range(500):
            store.append(plain_record(f"r{number}"))
        dropped = store.stats().dropped
        assert dropped >= 500 - OPTIONS.queue_records - OPTIONS.batch_records
    finally:
        mortal.start()
    while not store.flush(30):
        pass
    assert store.count() == 500 - dropped
    store.close()


def test_a_gateway_may_start_while_the_server_is_away(mortal: Server) -> None:
    url = mortal.database()
    mortal.kill()
    try:
        store = TraceStore(postgres_traces(url), OPTIONS)
        store.append(plain_record("early"))
        with pytest.raises(TraceStoreUnavailable):
            store.recent(1)
        with pytest.raises(TraceStoreUnavailable):
            TraceStore(postgres_traces(url), read_only=True)
    finally:
        mortal.start()
    while not store.flush(30):
        pass
    assert store.record("early") is not None
    store.close()


def test_a_close_while_the_server_is_away_says_that_something_is_lost(mortal: Server) -> None:
    store = TraceStore(postgres_traces(mortal.database()), OPTIONS)
    assert store.flush(30)
    mortal.kill()
    try:
        store.append(plain_record("late"))
        assert not store.close(20)
        assert store.stats().dropped == 1
    finally:
        mortal.start()


def test_what_will_never_be_a_trace_store_is_told_at_once(mortal: Server) -> None:
    url = make_url(mortal.database())
    with pytest.raises(TraceStoreError, match="no traces at"):
        TraceStore(postgres_traces(url.render_as_string(hide_password=False)), read_only=True)
    with pytest.raises(TraceStoreError, match="does not exist"):
        TraceStore(postgres_traces(url.set(database="nobody").render_as_string(hide_password=False)))
    for text_ in ("nonsense://", "mysql://host/db"):
        with pytest.raises(TraceStoreError):
            postgres_traces(text_)
    there = postgres_traces(url.render_as_string(hide_password=False))
    TraceStore(there).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE keepwarm_traces.version SET version = 99"))
    engine.dispose()
    with pytest.raises(TraceStoreError, match="schema 99"):
        TraceStore(postgres_traces(url.render_as_string(hide_password=False)))
    assert "secret" not in postgres_traces("postgresql://user:secret@host/db").name
