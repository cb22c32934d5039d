"""What happened between two steps of a run, inferred from when one answer ended and the next request came.

A gateway sees no tool run. It sees the answer that asked for it and the request that brings its result; the time
between is the tool's time and the client's own, so an upper bound, and calls that were asked for together share it.
Where the answer asked for no tool, somebody thought: a person, or the program that wrote the next turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tracing.record import RequestRecord, ToolCall


class GapKind(StrEnum):
    """What a gap was spent on."""

    TOOL = "tool"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Gap:
    """The time from the end of one answer to the arrival of the request that continues it."""

    kind: GapKind
    after_request_id: str
    before_request_id: str
    started_ns: int
    ended_ns: int
    calls: tuple[ToolCall, ...]  # whose results came back; none for a wait

    @property
    def duration_ns(self) -> int:
        """Upper bound of the time that each of ``calls`` took."""
        return self.ended_ns - self.started_ns


def gap_between(before: RequestRecord, after: RequestRecord) -> Gap | None:
    """The gap that ``after`` ends, given that it continues ``before``; ``None`` when that can't be told.

    An answer whose tool calls ``after`` brings no result of was continued by something else (an auxiliary call).
    """
    returned = frozenset(after.tool_results)
    calls = tuple(call for call in before.tool_calls if call.id in returned)
    if before.tool_calls and not calls:
        return None
    arrived_ns = after.stamps.arrived_ns
    started_ns = min(before.stamps.closed_ns or arrived_ns, arrived_ns)
    kind = GapKind.TOOL if calls else GapKind.WAIT
    return Gap(kind, before.request_id, after.request_id, started_ns, arrived_ns, calls)


def gaps(records: Iterable[RequestRecord]) -> tuple[Gap, ...]:
    """The gaps of one run's records, in the order of the requests that end them; at most one after each answer."""
    seen: dict[str, RequestRecord] = {}
    continued: set[str] = set()
    found: list[Gap] = []
    for record in records:
        seen[record.request_id] = record
        previous_id = record.link.previous_request_id if record.link else None
        if previous_id is None or previous_id not in seen or previous_id in continued:
            continue
        gap = gap_between(seen[previous_id], record)
        if gap is not None:
            continued.add(previous_id)
            found.append(gap)
    return tuple(found)
