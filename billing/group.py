"""One group commit: rows into the database in one synced transaction, each at most once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from billing.database import LedgerSession, Values
from billing.errors import RowsRefused
from billing.row import columns

_ID, _REVISION, _ARRIVED, _POSTED = (
    columns().index(name) for name in ("request_id", "revision", "arrived_ns", "posted_ns")
)
_BOUNDS = "SELECT (SELECT max(until_ns) FROM closings), (SELECT max(before_ns) FROM removals)"
_SET_ASIDE = "INSERT INTO refused (request_id, reason, payload) VALUES (:id, :reason, :payload)"


@dataclass(slots=True)
class GroupWritten:
    """What became of a group: everything in it is committed, was there before, or lies aside."""

    duplicates: int = 0  # rows that were already there
    conflicts: list[str] = field(default_factory=list)  # of those, ids whose row is a different one
    refused: list[tuple[str, str]] = field(default_factory=list)  # ids that the table cannot hold, and why


def write_group(session: LedgerSession, group: Sequence[Values], *, only_if_absent: bool = False) -> GroupWritten:
    """Commit and sync a group. Raises ``LedgerError``, and then nothing of it is written.

    A row whose period is closed already is posted to the first instant that is open. One from before what retention
    has removed lies aside: nobody can tell any more whether it was there. ``only_if_absent``: a row that is there
    already is the better one, and no conflict.
    """
    result = GroupWritten()
    with session.writing():
        ((closed_ns, removed_ns),) = session.query(_BOUNDS)
        if removed_ns is not None:
            group = [values for values in group if not _is_too_late(session, values, removed_ns, result)]
        if closed_ns is not None:
            group = [_posted(values, closed_ns) for values in group]
        aside = len(result.refused)
        try:
            new = session.insert_rows(group)
        except RowsRefused:
            new = _write_singly(session, group, result)
        result.duplicates = len(group) - new - (len(result.refused) - aside)
        if result.duplicates and not only_if_absent:
            result.conflicts = _conflicts(session, group)
    return result


def _posted(values: Values, closed_ns: int) -> Values:
    posted = values[_POSTED]
    assert isinstance(posted, int)
    return values if posted >= closed_ns else (*values[:_POSTED], closed_ns, *values[_POSTED + 1 :])


def _is_too_late(session: LedgerSession, values: Values, removed_ns: int, result: GroupWritten) -> bool:
    arrived = values[_ARRIVED]
    assert isinstance(arrived, int)
    if arrived >= removed_ns or values[_REVISION]:  # a correction says itself which revision it is
        return False
    _set_aside(session, values, "it arrived before what retention has removed", result)
    return True


def _write_singly(session: LedgerSession, group: Sequence[Values], result: GroupWritten) -> int:
    """Write row by row, so that one that the table cannot hold harms no other; it is kept aside, whole."""
    new = 0
    for values in group:
        try:
            new += session.insert_rows([values])
        except RowsRefused as error:
            _set_aside(session, values, str(error), result)
    return new


def _set_aside(session: LedgerSession, values: Values, reason: str, result: GroupWritten) -> None:
    result.refused.append((str(values[_ID]), reason))
    payload = msgspec.msgpack.encode(values)
    session.execute(_SET_ASIDE, {"id": str(values[_ID]), "reason": reason, "payload": payload})


def _conflicts(session: LedgerSession, group: Sequence[Values]) -> list[str]:
    """Find ids that are taken by a different row."""
    stored = {row[:2]: _without_posting(row) for row in session.rows_of([str(values[_ID]) for values in group])}
    return [
        str(values[_ID]) for values in group if values[:2] in stored and stored[values[:2]] != _without_posting(values)
    ]


def _without_posting(values: Values) -> Values:
    """Return a row less what the ledger itself chose."""
    return (*values[:_POSTED], *values[_POSTED + 1 :])
