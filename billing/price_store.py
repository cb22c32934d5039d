"""Price versions in the ledger: each is stored once, by its digest, before any row that was priced by it.

While the database is away a version lies in the journal folder, synced, and whoever connects next stores it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from billing.database import LedgerSession
from billing.errors import LedgerError
from billing.prices import PriceBook

_SUFFIX = ".prices"
_INSERT = """
INSERT INTO prices (version, name, currency, body) VALUES (:version, :name, :currency, :body) ON CONFLICT DO NOTHING
"""


def store(session: LedgerSession, book: PriceBook) -> None:
    """Store a version. Idempotent; synced on return. Raises ``LedgerError``."""
    with session.writing():
        session.execute(_INSERT, _described(book))


def leave(folder: Path, book: PriceBook) -> None:
    """Leave a version in the journal folder. Synced on return. Raises ``LedgerError``."""
    unfinished = folder / f".{book.version}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(msgspec.json.encode(_described(book)))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(folder / f"{book.version}{_SUFFIX}")
    except OSError as error:
        raise LedgerError(f"price version {book.version} could not be stored: {error}") from error


def store_left(session: LedgerSession, folder: Path) -> None:
    """Store what was left there, and remove it. Raises ``LedgerError``."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            described = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
            with session.writing():
                session.execute(_INSERT, described)
            path.unlink(missing_ok=True)
        except FileNotFoundError:  # another process was faster
            continue
        except (OSError, msgspec.DecodeError) as error:
            raise LedgerError(f"price version {path} cannot be stored: {error}") from error


def _described(book: PriceBook) -> dict[str, str]:
    return {"version": book.version, "name": book.name, "currency": book.currency, "body": book.body}
