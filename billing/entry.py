"""What the journal holds of a request: that it was admitted, or its row. MessagePack, with the columns' version."""

from __future__ import annotations

import msgspec

from billing.errors import LedgerError
from billing.row import SqlValue, storable

Values = tuple[SqlValue, ...]

#: The version of a row's columns. 2 added two; a journal of 1 is read as well.
ROW_VERSION = 2
_POSTED, _ARRIVED = 5, 2


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One journal record. An admission's row is the one to be written if its writer dies before a better one comes."""

    values: Values
    is_admission: bool = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return str(self.values[0])

    def encode(self) -> bytes:
        """Return the record. Raises ``LedgerError`` for a number that no ledger can hold."""
        try:
            return msgspec.msgpack.encode((ROW_VERSION, self.values, self.is_admission))
        except OverflowError as error:
            raise LedgerError(f"the row of {self.request_id} holds a number beyond 64 bits") from error


def entry_of(values: Values, *, is_admission: bool = False) -> tuple[Entry, bytes]:
    """Return the entry of a row, and its record, with its texts made storable where they are not."""
    entry = Entry(values, is_admission)
    try:
        return entry, entry.encode()
    except UnicodeEncodeError:
        entry = Entry(storable(values), is_admission)
        return entry, entry.encode()


def decode(payload: bytes) -> Entry:
    """Read a record. Raises ``LedgerError``."""
    try:
        version, *rest = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
        number = msgspec.msgpack.decode(version, type=int)
        if number in (1, ROW_VERSION):
            values = msgspec.msgpack.decode(rest[0], type=Values)
            if number == 1:
                values = (*values[:_POSTED], values[_ARRIVED], 0, *values[_POSTED:])
            return Entry(values, len(rest) > 1 and msgspec.msgpack.decode(rest[1], type=bool))
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise LedgerError(f"a journal holds something else than rows: {error}") from error
    raise LedgerError(f"a journal was written by another version (rows {number}); open it with that one first")
