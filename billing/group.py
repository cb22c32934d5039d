"""One group commit: rows into the database in one synced transaction, each at most once."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from billing import schema
from billing.row import SqlValue, columns

Values = tuple[SqlValue, ...]

_POSTED = columns().index("posted_ns")

#: What SQLite and its Python module raise for a row that no retry makes storable.
_CANNOT_HOLD = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, OverflowError)


@dataclass(slots=True)
class GroupWritten:
    """What became of a group: everything in it is committed, was there before, or lies aside."""

    duplicates: int = 0  # rows that were already there
    conflicts: list[str] = field(default_factory=list)  # of those, ids whose row is a different one
    refused: list[tuple[str, str]] = field(default_factory=list)  # ids that the table cannot hold, and why


def write_group(
    connection: sqlite3.Connection, group: Sequence[Values], *, only_if_absent: bool = False
) -> GroupWritten:
    """Commit and sync a group. Raises ``sqlite3.Error``, and then nothing of it is written.

    A row whose period is closed already is posted to the first instant that is open. ``only_if_absent``: a row that is
    there already is the better one, and no conflict.
    """
    result = GroupWritten()
    connection.execute("BEGIN IMMEDIATE")
    try:
        group = _open_period(connection, group)
        try:
            new = schema.insert(connection, group)
        except _CANNOT_HOLD:
            connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            new = _write_singly(connection, group, result)
        result.duplicates = len(group) - new - len(result.refused)
        if result.duplicates and not only_if_absent:
            result.conflicts = _conflicts(connection, group)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    return result


def _open_period(connection: sqlite3.Connection, group: Sequence[Values]) -> Sequence[Values]:
    until_ns: int | None = connection.execute("SELECT max(until_ns) FROM closings").fetchone()[0]
    if until_ns is None:
        return group
    return [
        (*values[:_POSTED], until_ns, *values[_POSTED + 1 :]) if int(values[_POSTED] or 0) < until_ns else values
        for values in group
    ]


def _write_singly(connection: sqlite3.Connection, group: Sequence[Values], result: GroupWritten) -> int:
    """Write row by row, so that one that the table cannot hold harms no other; it is kept aside, whole."""
    new = 0
    for values in group:
        try:
            new += schema.insert(connection, [values])
        except _CANNOT_HOLD as error:
            result.refused.append((str(values[0]), str(error)))
            connection.execute(
                "INSERT INTO refused (request_id, reason, payload) VALUES (?, ?, ?)",
                (str(values[0]), str(error), msgspec.msgpack.encode(values)),
            )
    return new


def _conflicts(connection: sqlite3.Connection, group: Sequence[Values]) -> list[str]:
    """Find ids that are taken by a different row."""
    find = f"SELECT {', '.join(columns())} FROM requests WHERE request_id = ? AND revision = ?"
    taken = []
    for values in group:
        stored = connection.execute(find, values[:2]).fetchone()
        if stored is not None and _without_posting(stored) != _without_posting(values):
            taken.append(str(values[0]))
    return taken


def _without_posting(values: Values) -> Values:
    """Return a row less what the ledger itself chose."""
    return (*values[:_POSTED], *values[_POSTED + 1 :])
