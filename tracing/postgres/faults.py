"""A PostgreSQL server's faults as its user tells them: away for now, or wrong for good. Whoever has tables there says
which errors of its own those are; the ledger and the store of keys, too, which lie on the floors above."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

_LATER = re.compile("starting up|shutting down|recovery|not yet accepting|too many|connection slots")


@contextmanager
def faults_told(what: str, *, wrong: type[Exception], away: type[Exception]) -> Iterator[None]:
    """Turn the driver's errors into ``wrong`` or ``away``, each told in one line that begins with ``what``."""
    try:
        yield
    except OperationalError as error:
        told = str(error.orig)
        is_final = "FATAL:" in told and not _LATER.search(told)  # no such database, a wrong password
        raise (wrong if is_final else away)(_line(what, error.orig)) from error
    except DBAPIError as error:
        raise (away if error.connection_invalidated else wrong)(_line(what, error.orig)) from error
    except SQLAlchemyError as error:  # the pool is exhausted, or the connection was lost before
        raise away(_line(what, error)) from error


def _line(what: str, error: BaseException | None) -> str:
    return f"{what}: {' '.join(str(error).split())}"
