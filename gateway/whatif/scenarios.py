"""The scenarios: each says, for one recorded request after the other, what its usage and its charge would have been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from billing.meter import recharge
from billing.prices import PriceBook
from gateway.whatif.kept import KeptPrefixes
from gateway.whatif.usage import with_hits
from tracing.detail import BreakKind, StepDetail
from tracing.record import Charge, RequestRecord, Usage

EVERYWHERE = "all instances"


HAPPENED = "recorded"
"""The name of what happened."""


class Scenario(Protocol):
    """One thing that could have been otherwise. ``usage`` is asked of every record, in the order of arrival.

    ``beside``: the name of what it is to be compared with.
    """

    name: str
    title: str
    beside: str

    def usage(self, record: RequestRecord) -> Usage:
        """Return what its answer would have counted."""

    def charge(self, record: RequestRecord, usage: Usage) -> Charge:
        """Return what that would have cost."""

    def ttft_ns(self, record: RequestRecord) -> int | None:
        """Return its time to the first token; ``None``: it follows from the tokens that are computed."""


class _AsRecorded:
    """Charges by the price version and on the basis of the record itself."""

    beside = HAPPENED

    def __init__(self, books: Mapping[str, PriceBook]) -> None:
        self._books = books

    def charge(self, record: RequestRecord, usage: Usage) -> Charge:
        """Return the charge of that usage at the prices of its time."""
        charge = record.charge
        if usage == record.usage or charge.basis is None:
            return charge
        return recharge(usage, self._books[charge.price_version], charge.basis)

    def ttft_ns(self, record: RequestRecord) -> int | None:
        """Return nothing of its own."""
        return None


class PerfectPrefix(_AsRecorded):
    """Whatever had been computed before, anywhere and ever, is at hand: one cache for all that never forgets."""

    name, title = "perfect", "Perfect prefix"

    def __init__(self, books: Mapping[str, PriceBook], stride_tokens: int) -> None:
        super().__init__(books)
        self._kept = KeptPrefixes(stride_tokens)

    def usage(self, record: RequestRecord) -> Usage:
        """Return the usage; what was hit in fact is never lost by it."""
        return with_hits(record.usage, max(self._kept.hit_tokens(record, EVERYWHERE), record.usage.hit_tokens))


class Retention(_AsRecorded):
    """Prefixes stay at hand for a time after their last use, where they were computed or (``shared``) everywhere."""

    def __init__(
        self, books: Mapping[str, PriceBook], stride_tokens: int, retention_ns: int, label: str, *, shared: bool
    ) -> None:
        super().__init__(books)
        self.name = f"keep-{label}" + ("-shared" if shared else "")
        self.title = f"Kept {label} after use" + (", for all instances" if shared else ", on their instance")
        self._shared = shared
        self._kept = KeptPrefixes(stride_tokens, retention_ns)

    def usage(self, record: RequestRecord) -> Usage:
        """Return the usage with exactly the hits that this rule gives: it may be fewer than there were."""
        place = EVERYWHERE if self._shared else record.instance or EVERYWHERE
        return with_hits(record.usage, self._kept.hit_tokens(record, place))


class Repair(_AsRecorded):
    """Breaks of some kinds had not happened: what a step repeats behind its first difference is hit as well.

    Tokens are shared out by characters of the prompt, as far as the step's diagnosis tells them.
    """

    def __init__(
        self, books: Mapping[str, PriceBook], details: Mapping[str, StepDetail], kinds: frozenset[BreakKind], name: str
    ) -> None:
        super().__init__(books)
        self.name = f"repair-{name}"
        self.title = f"Repaired: {name.replace('_', ' ')}"
        self._details, self._kinds = details, kinds

    def usage(self, record: RequestRecord) -> Usage:
        """Return the usage."""
        detail = self._details.get(record.request_id)
        change = None if detail is None else detail.change
        if change is None or change.kind not in self._kinds or change.total_chars <= 0:
            return record.usage
        kept = min(change.kept_chars + change.repeated_chars, change.total_chars)
        hits = record.usage.prompt_tokens * kept // change.total_chars
        return with_hits(record.usage, max(hits, record.usage.hit_tokens))


class OtherPrices(_AsRecorded):
    """The same tokens at another book's prices."""

    def __init__(self, book: PriceBook, label: str) -> None:
        super().__init__({})
        self.name, self.title, self._book = f"prices-{label}", f"Prices of {label}", book

    def usage(self, record: RequestRecord) -> Usage:
        """Return what was."""
        return record.usage

    def charge(self, record: RequestRecord, usage: Usage) -> Charge:
        """Return the charge at the other prices."""
        if record.charge.basis is None:
            return record.charge
        return recharge(usage, self._book, record.charge.basis)
