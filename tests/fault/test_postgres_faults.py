"""A ledger in PostgreSQL whose server crashes, whose writers are killed, and whose tables somebody tries to change."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from billing.errors import LedgerError
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.postgres.database import PostgresDatabase, postgres_database
from billing.prices import PriceBook
from billing.row import columns, row_of
from billing.verify import verify_ledger
from tests.samples.billed import billed, died_in_flight, many
from tests.samples.ledger_writer import OPTIONS
from tests.samples.postgres import Server, running

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mortal() -> Iterator[Server]:
    """A server of these tests' own, to be killed."""
    with running() as server:
        yield server


def acknowledged(output: bytes) -> set[int]:
    return {int(line) for line in output.split(b"\n")[:-1] if line.isdigit()}


def check(database: PostgresDatabase, acked: set[int], *, unacknowledged: int) -> None:
    with Ledger(database, OPTIONS) as ledger:
        ledger.register(PriceBook.default())
    assert list(database.journal_dir.glob("*.journal")) == []
    with LedgerReader(database) as reader:
        rows = list(reader.rows())
    book = PriceBook.default()
    for row in rows:
        assert row == row_of(billed(int(row.request_id.removeprefix("req-")), book))
    ids = Counter(int(row.request_id.removeprefix("req-")) for row in rows)
    assert max(ids.values()) == 1
    assert acked <= ids.keys()
    assert len(ids) - len(acked) <= unacknowledged
    assert verify_ledger(database).faults == []


def test_a_server_that_crashes_and_comes_back_loses_no_bill(mortal: Server, tmp_path: Path) -> None:
    database, records = postgres_database(mortal.database(), tmp_path / "journal"), many(900)
    with Ledger(database, replace(OPTIONS, max_memory_rows=100)) as ledger:
        ledger.register(PriceBook.default())
        for record in records[:300]:
            ledger.append(record)
        mortal.kill()  # with a group under way
        for number, record in enumerate(records[300:600], 300):
            ledger.admit(died_in_flight(number, PriceBook.default()))
            ledger.append(record)
        while not ledger.status().failing_since_ns:
            ledger.flush(0.01)
        assert ledger.status().spilled > 0
        mortal.start()
        for record in records[600:]:
            ledger.append(record)
        assert ledger.flush(60)
        assert ledger.status().conflicts == 0
    check(database, set(range(900)), unacknowledged=0)


def test_a_gateway_may_start_while_the_server_is_away(mortal: Server, tmp_path: Path) -> None:
    database = postgres_database(mortal.database(), tmp_path / "journal")
    Ledger(database, OPTIONS).start().close()
    mortal.kill()
    try:
        with pytest.raises(LedgerError):
            LedgerReader(database)
        ledger = Ledger(database, OPTIONS).start()
        ledger.register(PriceBook.default())
        for record in many(20):
            ledger.append(record)
    finally:
        mortal.start()
    assert ledger.flush(60)
    ledger.close()
    check(database, set(range(20)), unacknowledged=0)


@pytest.mark.parametrize("step", ["torn", "begin", "insert", "commit", "committed", "sealed"])
def test_a_writer_killed_at_each_step_beside_another(mortal: Server, tmp_path: Path, step: str) -> None:
    url, journal = mortal.database(), tmp_path / "journal"
    database = postgres_database(url, journal)
    Ledger(database, OPTIONS).start().close()
    command = [sys.executable, "-m", "tests.samples.ledger_writer", f"{url} {journal}"]
    victim = subprocess.Popen([*command, "0", "2000", step], cwd=ROOT, stdout=subprocess.PIPE)
    other = subprocess.Popen([*command, "10000", "150"], cwd=ROOT, stdout=subprocess.PIPE)
    told, _ = victim.communicate(timeout=120)
    assert victim.returncode == -9
    others, _ = other.communicate(timeout=120)
    assert others.endswith(b"closed\n")
    check(database, acknowledged(told) | acknowledged(others), unacknowledged=1)


def test_gateways_that_start_at_once_make_the_tables_once(mortal: Server, tmp_path: Path) -> None:
    url, failures = mortal.database(), list[BaseException]()

    def start(number: int) -> None:
        try:
            with Ledger(postgres_database(url, tmp_path / f"journal-{number}"), OPTIONS) as ledger:
                ledger.register(PriceBook.default())
                ledger.append(billed(number, PriceBook.default()))
        except LedgerError as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check(postgres_database(url, tmp_path / "journal-0"), {0, 1, 2, 3}, unacknowledged=0)


class TestRights:
    def run(self, url: str, statement: str) -> object:
        engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
        try:
            with engine.begin() as connection:
                found = connection.execute(text(statement))
                return found.scalar() if found.returns_rows else None
        finally:
            engine.dispose()

    def test_a_gateways_role_can_write_bills_and_change_none(self, mortal: Server, tmp_path: Path) -> None:
        url = mortal.database()
        role = "gateway_" + (make_url(url).database or "")[:8]
        self.run(url, f"CREATE ROLE {role} LOGIN")
        owner = postgres_database(url, tmp_path / "owner")
        assert owner.migrate(role) == (None, "0001")
        lesser = make_url(url).set(username=role).render_as_string(hide_password=False)
        with Ledger(postgres_database(lesser, tmp_path / "journal", migrates=False), OPTIONS) as ledger:
            ledger.register(PriceBook.default())
            for record in many(30):
                ledger.append(record)
        check(postgres_database(lesser, tmp_path / "journal", migrates=False), set(range(30)), unacknowledged=0)
        month = self.run(url, "SELECT tableoid::regclass::text FROM requests LIMIT 1")
        for statement in (
            "UPDATE requests SET amount_nano = 0",
            f"UPDATE {month} SET amount_nano = 0",
            f"DELETE FROM {month}",
            f"DROP TABLE {month}",
            "TRUNCATE requests",
            "DELETE FROM request_ids",
            "UPDATE closings SET totals = ''",
            "ALTER TABLE requests DISABLE TRIGGER ALL",
            f"SELECT drop_ledger_months({2**62})",
        ):
            with pytest.raises(DBAPIError):
                self.run(lesser, statement)
        for statement in (f"UPDATE {month} SET amount_nano = 0", f"TRUNCATE {month}", "TRUNCATE requests"):
            with pytest.raises(DBAPIError, match="append-only"):
                self.run(url, statement)  # not even the owner, unless the trigger goes first

    def test_tables_of_another_version_are_told_by_name(self, mortal: Server, tmp_path: Path) -> None:
        url = mortal.database()
        with pytest.raises(LedgerError, match="ledger migrate"):
            Ledger(postgres_database(url, tmp_path / "journal", migrates=False)).start()
        with pytest.raises(LedgerError, match="there is no ledger"):
            LedgerReader(postgres_database(url, tmp_path / "journal"))
        postgres_database(url, tmp_path / "journal").migrate()
        self.run(url, "UPDATE ledger_version SET version_num = '9999'")
        with pytest.raises(LedgerError, match="9999"):
            Ledger(postgres_database(url, tmp_path / "journal")).start()

    def test_a_wrong_place_stops_the_start(self, mortal: Server, tmp_path: Path) -> None:
        nowhere = make_url(mortal.database()).set(database="nowhere").render_as_string(hide_password=False)
        with pytest.raises(LedgerError, match="nowhere"):
            Ledger(postgres_database(nowhere, tmp_path / "journal")).start()
        for url in ("mysql://h/d", "no url at all"):
            with pytest.raises(LedgerError):
                postgres_database(url, tmp_path)

    def test_the_tables_have_the_columns_of_rows(self, mortal: Server, tmp_path: Path) -> None:
        url = mortal.database()
        postgres_database(url, tmp_path).migrate()
        names = self.run(
            url,
            "SELECT string_agg(column_name, ',' ORDER BY ordinal_position) FROM information_schema.columns"
            " WHERE table_name = 'requests'",
        )
        assert str(names).split(",") == ["seq", *columns()]
