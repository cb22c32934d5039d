"""From a page to the form in which a tier stores it, and back; what ``kvstore.at_rest`` asks for, done.

The checksum rule holds: what is stored is checked before it is believed. An encrypted page must prove itself under its
key (GCM), and what comes out of it must have the checksum that its header told; a page in fp8 is checked in that form,
and the page that is made of it is hashed as it is handed on, since it is another page than the one that was put.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from kvstore.at_rest import AtRest
from kvstore.codec import PageHeader, StoredForm, checksum
from kvstore.errors import MediumError, RecordError
from kvstore.memory import ALIGNMENT, copy_and_hash, copy_bytes, page_rows
from kvstore.page import Namespace, PageLayout
from kvstore.tiers.base import Page

if TYPE_CHECKING:
    from kvstore.encryption import KeyRing, PageCipher
    from kvstore.narrow import Narrower, NarrowForm

FP8 = "float8_e4m3fn"
"""What headers call the narrow form; see ``kvstore.narrow``."""

_STAGED_BYTES = 8 << 20
_READERS = 2  # at once: each has staging memory of its own


@dataclass(frozen=True, slots=True)
class Stored:
    """The header of a page that was brought into its form: as it is written down, and as its owner knows it."""

    told: PageHeader
    known: PageHeader


@dataclass(slots=True)
class Workshop:
    """Memory to change pages in, for one thread at a time: rows of ``slot_bytes`` as they are stored, and one more."""

    rows: list[memoryview]
    spare: memoryview
    narrower: Narrower | None


class PageForms:
    """What one tier of one layout does to pages. Thread-safe."""

    def __init__(self, layout: PageLayout, at_rest: AtRest) -> None:
        """Raises ``MediumError`` for what cannot be done with pages of this layout."""
        self._at_rest = at_rest
        self._page_bytes = layout.page_bytes
        self._cipher = _cipher(at_rest)
        self._narrow_form = _narrow_form(layout, at_rest.fp8_of) if at_rest.fp8 else None
        is_narrow_throughout = self._narrow_form is not None and at_rest.fp8.is_all
        widest = self._narrow_form.stored_bytes if self._narrow_form and is_narrow_throughout else self._page_bytes
        unit = ALIGNMENT if self._page_bytes % ALIGNMENT == 0 else 1
        self.slot_bytes = min(self._page_bytes, -(-widest // unit) * unit)
        """Room for the widest page that is stored."""
        self._idle: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
        self._writer: Workshop | None = None
        self._lock = threading.Lock()
        self._to_open = _READERS  # workshops that nobody needed yet

    @property
    def encrypts(self) -> bool:
        """Whether any page is encrypted."""
        return self._cipher is not None and bool(self._at_rest.encrypts)

    @property
    def writer(self) -> Workshop:
        """The workshop of the tier's one writer."""
        if self._writer is None:
            self._writer = self._workshop()
        return self._writer

    @contextmanager
    def reader(self) -> Iterator[Workshop]:
        """Lend a reader a workshop; waits while all are lent."""
        with self._lock:
            is_new = self._to_open > 0 and self._idle.empty()
            self._to_open -= is_new
        workshop = self._workshop() if is_new else self._idle.get()
        try:
            yield workshop
        finally:
            self._idle.put(workshop)

    def store(self, page: Page, row: memoryview, workshop: Workshop, expires_at_s: int) -> Stored | None:
        """Fill ``row`` with a page in its form; return its header, or ``None`` for a page that has no such form."""
        namespace = page.meta.namespace
        narrower = workshop.narrower if namespace in self._at_rest.fp8 else None
        cipher = self._cipher_for(namespace)
        form = None if narrower is None else StoredForm(narrower.form.stored_bytes, FP8)
        form = form if form is not None or cipher is None else StoredForm(self._page_bytes)
        source, found = page.data, page.checksum
        if narrower is not None:
            target = (row if cipher is None else workshop.spare)[: narrower.form.stored_bytes]
            if checksum(page.data) != page.checksum or not narrower.narrow(page.data, target):
                return None
            source, found = target, checksum(target)
        header = PageHeader(page.key, self._page_bytes, found, page.meta, expires_at_s, form)
        if cipher is None:
            if narrower is None:
                copy_bytes(row[: self._page_bytes], source)
            return Stored(header, header)
        assert form is not None, "what is encrypted has a form"
        told = cipher.seal(header, form, source, row[: form.length])
        return Stored(told, structs.replace(header, form=told.form))

    def open_header(self, header: PageHeader) -> PageHeader:
        """Return the header with what it tells those who have its key.

        Raises ``RecordError``: "unknown_key", "authentication", "in_clear" for a page that should be encrypted, and
        "form" for one that is stored as this tier stores none.
        """
        opened = header if self._cipher is None else self._cipher.open_header(header)
        form = header.form
        if form is not None and form.envelope is not None and self._cipher is None:
            raise RecordError("unknown_key")
        if (form is None or form.envelope is None) and self._cipher_for(opened.meta.namespace) is not None:
            raise RecordError("in_clear")
        expected = self._page_bytes
        if form is not None and form.narrow:
            if form.narrow != FP8 or self._narrow_form is None:
                raise RecordError("form")
            expected = self._narrow_form.stored_bytes
        if header.length != self._page_bytes or (form is not None and form.length != expected):
            raise RecordError("length")
        return opened

    def restore(self, header: PageHeader, stored: memoryview, out: memoryview, workshop: Workshop) -> int:
        """Make the page of what is stored, whose header was opened; return its checksum. Raises ``RecordError``."""
        form = header.form
        if form is None:
            found = copy_and_hash([out], [stored])[0]
            return _same(found, header.checksum)
        plain = stored
        if form.envelope is not None:
            assert self._cipher is not None, "its header was opened"
            plain = workshop.spare[: form.length] if form.narrow else out
            self._cipher.open(header, stored, plain)
        if not form.narrow:
            return _same(checksum(out), header.checksum)
        _same(checksum(plain), header.checksum)
        assert workshop.narrower is not None, "its header was opened"
        workshop.narrower.widen(plain, out)
        return checksum(out)

    def _cipher_for(self, namespace: Namespace) -> PageCipher | None:
        return self._cipher if namespace in self._at_rest.encrypts else None

    def _workshop(self) -> Workshop:
        rows = page_rows(max(1, _STAGED_BYTES // self._page_bytes), self._page_bytes)
        narrower = None
        if self._narrow_form is not None:
            from kvstore.narrow import Narrower

            narrower = Narrower(self._narrow_form)
        return Workshop([memoryview(row) for row in rows], memoryview(page_rows(1, self._page_bytes)[0]), narrower)


class StoredReader:
    """Looks at what is stored without making pages of it; for one thread. ``page_bytes``: of the longest, if known."""

    def __init__(self, keys: KeyRing | None, page_bytes: int) -> None:
        self._cipher = None if keys is None else _cipher(AtRest(keys))
        self._spare = bytearray(page_bytes)

    def open(self, header: PageHeader) -> PageHeader:
        """Return the header with all that it tells. Raises ``RecordError``, "unknown_key" where its key is not here."""
        if header.form is None or header.form.envelope is None:
            return header
        if self._cipher is None:
            raise RecordError("unknown_key")
        return self._cipher.open_header(header)

    def verify(self, header: PageHeader, stored: memoryview) -> None:
        """Check the bytes of a page whose header was opened. Raises ``RecordError``."""
        length = header.length if header.form is None else header.form.length
        if len(stored) != length:
            raise RecordError("length")
        if header.form is not None and header.form.envelope is not None and self._cipher is not None:
            if len(self._spare) < length:
                self._spare = bytearray(length)
            plain = memoryview(self._spare)[:length]
            self._cipher.open(header, stored, plain)
            stored = plain
        _same(checksum(stored), header.checksum)


def forms_of(layout: PageLayout, at_rest: AtRest) -> PageForms | None:
    """Return what a tier does to its pages, ``None`` if it stores them as they are. Raises ``MediumError``."""
    return None if at_rest.is_plain else PageForms(layout, at_rest)


def _same(found: int, told: int) -> int:
    if found != told:
        raise RecordError("checksum")
    return found


def _cipher(at_rest: AtRest) -> PageCipher | None:
    if at_rest.keys is None:
        return None
    from kvstore.encryption import PageCipher

    return PageCipher(at_rest.keys)


def _narrow_form(layout: PageLayout, elements_are: str | None) -> NarrowForm:
    try:
        from kvstore.narrow import narrow_form

        return narrow_form(layout, elements_are)
    except (ImportError, ValueError) as error:
        raise MediumError(f"no fp8 for these pages: {error}") from error
