"""Waste: work that was paid for and that nobody needed. Pure.

==============  ======================================================================================================
duplicate       the same conversation of the same key again within ten minutes, while or after it was answered well;
                wasted is the whole of the later request
re_prefilled    the same again after it had failed, been cut or been abandoned: its prompt is paid for twice;
                wasted are its computed prompt tokens
abandoned       the client left before the end; wasted is the whole request
==============  ======================================================================================================

Conversations are the same when the digests of what the client sent are. A client that asks for several samples of one
prompt in separate requests shows up as duplicates: whether they were wanted nobody can see.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tracing.record import Outcome, RequestRecord, UsageSource

WITHIN_NS = 600 * 10**9
MAX_PROMPTS_KEPT = 50_000
_COMPUTED = ("fresh", "write", "write_5m", "write_1h")


class WasteKind(StrEnum):
    """What kind of waste."""

    DUPLICATE = "duplicate"
    RE_PREFILLED = "re_prefilled"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Waste:
    """What one request wasted: computed tokens (prompt and output) and money."""

    record: RequestRecord
    kind: WasteKind
    tokens: int
    amount_nano: int


class Wastes:
    """Finds the waste of records that come in order of arrival; a request is in one kind at most."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], RequestRecord] = OrderedDict()

    def of(self, record: RequestRecord) -> Iterator[Waste]:
        """Yield what a request wasted. O(1)."""
        before = self._former(record)
        usage = record.usage
        if usage.source in (UsageSource.NONE, UsageSource.MISSING):
            return
        whole = usage.total_tokens - usage.hit_tokens
        amount = record.charge.amount_nano or 0
        if record.outcome is Outcome.ABORTED:
            yield Waste(record, WasteKind.ABANDONED, whole, amount)
        elif before is not None and before.outcome is Outcome.OK:
            yield Waste(record, WasteKind.DUPLICATE, whole, amount)
        elif before is not None and before.usage.source is not UsageSource.NONE:
            prompt = sum(line.amount_nano for line in record.charge.lines if line.token_class in _COMPUTED)
            computed = usage.prompt_tokens - usage.hit_tokens
            if computed:
                yield Waste(record, WasteKind.RE_PREFILLED, computed, prompt)

    def _former(self, record: RequestRecord) -> RequestRecord | None:
        """Return the last request with the same conversation, if it is not too long ago; keep this one."""
        digest = record.prefix.digest if record.prefix is not None else None
        if digest is None:
            return None
        place = (record.identity.key_id, f"{record.served_model} {digest}")
        former = self._last.pop(place, None)
        self._last[place] = record
        if len(self._last) > MAX_PROMPTS_KEPT:
            self._last.popitem(last=False)
        if former is None or record.stamps.arrived_ns - former.stamps.arrived_ns > WITHIN_NS:
            return None
        return former
