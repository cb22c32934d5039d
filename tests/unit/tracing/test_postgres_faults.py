"""What PostgreSQL's faults become: no server is needed to say them."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tracing.postgres.faults import faults_told


class Wrong(Exception):
    pass


class Away(Exception):
    pass


def operational(text: str) -> OperationalError:
    return OperationalError("SELECT 1", None, Exception(text))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (operational('FATAL:  password authentication failed for user "u"'), Wrong),
        (operational("FATAL:  the database system is starting up"), Away),
        (operational("FATAL:  sorry, too many clients already"), Away),
        (operational("connection refused\n\tIs the server running?"), Away),
        (DBAPIError("SELECT 1", None, Exception("no such column")), Wrong),
        (DBAPIError("SELECT 1", None, Exception("it broke"), connection_invalidated=True), Away),
        (PoolTimeout("the pool is exhausted"), Away),
    ],
)
def test_each_fault_is_one_line_of_its_users(fault: SQLAlchemyError, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, faults_told("ledger x", wrong=Wrong, away=Away):
        raise fault
    assert str(caught.value).startswith("ledger x: ")
    assert "\n" not in str(caught.value)
