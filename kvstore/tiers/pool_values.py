"""What the value of a pool's key must be for its page to be believed."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.codec import PageHeader, checksum, sealed_length, unseal, verify_header
from kvstore.errors import RecordError
from kvstore.page import PageKey
from kvstore.page_forms import PageForms, Workshop
from kvstore.tiers.base import Found
from kvstore.tiers.pool_client import Unavailable
from kvstore.tiers.resp import ErrorReply, Value


class PoolValues:
    """Reads values: a sealed header, then the page, in its layout's form or in one of its own."""

    def __init__(self, page_bytes: int, forms: PageForms | None, clock: Callable[[], float]) -> None:
        self._page_bytes = page_bytes
        self._forms = forms
        self._clock = clock

    def accept(
        self,
        key: PageKey,
        value: Value | ErrorReply | Unavailable | None,
        row: memoryview,
        out: memoryview | None = None,
        workshop: Workshop | None = None,
    ) -> Found | str:
        """Return what a value is whose end is in ``row``, or why it is refused; bring its page to ``out``, if given."""
        if value is None:
            return "absent"
        if isinstance(value, Unavailable):
            return "unavailable"
        if isinstance(value, ErrorReply):
            return "record"
        head: memoryview | bytes = value.head
        if value.length < self._page_bytes:
            head = row[: value.length]
        elif sealed_length(head) > len(head):
            head = value.head + bytes(row[: sealed_length(head) - len(head)])  # one that was cut, or is stored narrow
        try:
            header, start = self.unseal(key, head)
            stored_bytes = self._page_bytes if header.form is None else header.form.length
            if value.length != start + stored_bytes:
                return "length"
            if 0 < header.expires_at_s <= self._clock():
                return "expired"
            if self._forms is not None and out is not None and workshop is not None:
                end = min(value.length, self._page_bytes)
                found = self._forms.restore(header, row[end - stored_bytes : end], out, workshop)
            else:
                found = checksum(row) if value.body_sum is None else value.body_sum
                if found != header.checksum:
                    return "checksum"
        except RecordError as error:
            return error.reason
        return Found(found, header.meta, header.expires_at_s)

    def unseal(self, key: PageKey, head: memoryview | bytes) -> tuple[PageHeader, int]:
        """Return what a value's head says, all that this process may know of it. Raises ``RecordError``."""
        header, start = unseal(key, head, PageHeader)
        verify_header(header, key, self._page_bytes)
        if self._forms is not None:
            return self._forms.open_header(header), start
        if header.form is not None:
            raise RecordError("form" if header.form.envelope is None else "unknown_key")
        return header, start
