"""The memory of prefixes: every part of a prompt that was ever computed, by whom it was last, and who read it since.

A *part* is the tokens between two marks of a prompt, named by the mark at its end, so its name holds everything before
it. What a request hit was read from whoever computed it last; what it computed is its own from then on, readable from
its first token. A write's cost is the share of its request's computed tokens that it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tracing.record import RequestRecord, UsageSource

_WRITTEN = ("fresh", "write", "write_5m", "write_1h")
NOBODY = "-"
"""Who wrote what was there before the first record, or what no mark names."""


@dataclass(slots=True)
class Flow:
    """What one unit read of what another (or itself) computed. ``transfer_nano``: what it pays for it, by the rule."""

    tokens: int = 0
    saved_nano: int = 0
    transfer_nano: int = 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that was read: its name (the mark at its end), its length and what reading it came to.

    ``tokens`` are counted from the prompt's start; what is read and saved is that of the part which this prefix has for
    itself, beyond the longest one that was read more often.
    """

    name: str
    tokens: int
    writer: str
    readers: tuple[str, ...]
    reads: int
    read_tokens: int
    saved_nano: int
    currency: str


@dataclass(slots=True)
class _Write:
    unit: str
    currency: str
    cost_nano: int
    uses: dict[str, int] | None  # by unit, the writer's own first; ``None``: the writer pays


@dataclass(slots=True)
class _Part:
    parent: int | None
    end_tokens: int
    write: _Write
    readable_ns: int
    used_ns: int
    instance: str | None
    reads: int = 0
    read_tokens: int = 0
    saved_nano: int = 0
    readers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Found:
    """What was known of a prompt when it came. ``known_tokens``: the longest prefix that had been computed by then.

    ``instance`` and ``used_ns``: where the end of it was seen last, and when.
    """

    marks: tuple[int, ...] = ()
    stride_tokens: int = 0
    known_tokens: int = 0
    instance: str | None = None
    used_ns: int = 0


class Prefixes:
    """See the module."""

    def __init__(self) -> None:
        self.flows: dict[tuple[str, str, str], Flow] = {}
        self._parts: dict[int, _Part] = {}

    def look_up(self, record: RequestRecord) -> Found:
        """Return what is known of a record's prompt. O(marks)."""
        if record.prefix is None:
            return Found()
        marks, stride = record.prefix.marks(), record.prefix.stride_tokens
        last: _Part | None = None
        for mark in marks:
            part = self._parts.get(mark)
            if part is None or part.readable_ns > record.stamps.arrived_ns:
                break
            last = part
        if last is None:
            return Found(marks, stride)
        return Found(marks, stride, last.end_tokens, last.instance, last.used_ns)

    def take(self, record: RequestRecord, found: Found, unit: str, *, shares_writes: bool) -> None:
        """Take in what a request read and computed. O(marks)."""
        if record.usage.source in (UsageSource.NONE, UsageSource.MISSING):
            return
        self._read(record, found, unit)
        self._write(record, found, unit, shares_writes=shares_writes)

    def finish(self) -> None:
        """Settle every write that still stands."""
        for part in self._parts.values():
            self._settle(part.write)

    def shared(self, limit: int = 100) -> list[SharedPrefix]:
        """Return the prefixes whose reading saved most. O(parts)."""
        further = {part.parent for part in self._parts.values() if self._goes_on(part)}
        found = [self._prefix(mark, part) for mark, part in self._parts.items() if part.reads and mark not in further]
        return sorted(found, key=lambda each: (-each.saved_nano, each.name))[:limit]

    def _goes_on(self, part: _Part) -> bool:
        before = self._parts.get(part.parent) if part.parent is not None else None
        return before is not None and before.reads == part.reads

    def _prefix(self, mark: int, end: _Part) -> SharedPrefix:
        parts = [end]
        while self._goes_on(parts[-1]):
            parts.append(self._parts[parts[-1].parent])  # type: ignore[index]  # it goes on, so there is one
        return SharedPrefix(
            name=f"{mark:016x}",
            tokens=end.end_tokens,
            writer=end.write.unit,
            readers=tuple(sorted(end.readers)),
            reads=end.reads,
            read_tokens=sum(part.read_tokens for part in parts),
            saved_nano=sum(part.saved_nano for part in parts),
            currency=end.write.currency,
        )

    def _read(self, record: RequestRecord, found: Found, unit: str) -> None:
        hits, saved = record.usage.hit_tokens, record.charge.saved_nano or 0
        if not hits:
            return
        done = 0
        for mark, start, end in _spans(found, 0, hits):
            tokens, part = end - start, None if mark is None else self._parts.get(mark)
            share = saved * end // hits - done
            done += share
            writer = NOBODY if part is None else part.write.unit
            flow = self._flow(writer, unit, record.charge.currency)
            flow.tokens += tokens
            flow.saved_nano += share
            if part is None:
                continue
            part.used_ns, part.instance = record.stamps.arrived_ns, record.instance
            part.reads += 1
            part.read_tokens += tokens
            part.saved_nano += share
            part.readers.add(unit)
            if part.write.uses is not None:
                part.write.uses[unit] = part.write.uses.get(unit, 0) + 1

    def _write(self, record: RequestRecord, found: Found, unit: str, *, shares_writes: bool) -> None:
        hits, prompt, stamps = record.usage.hit_tokens, record.usage.prompt_tokens, record.stamps
        cost = sum(line.amount_nano for line in record.charge.lines if line.token_class in _WRITTEN)
        readable_ns = stamps.first_token_ns if stamps.first_token_ns is not None else stamps.closed_ns
        done = 0
        for mark, start, end in _spans(found, hits, prompt):
            share = cost * (end - hits) // (prompt - hits) - done
            done += share
            if mark is None:
                continue
            place = start // found.stride_tokens
            is_whole = start == place * found.stride_tokens
            if (old := self._parts.get(mark)) is not None:
                if not is_whole:
                    continue  # most of it was read, and stays its writer's
                if old.write.uses is not None:
                    self._settle(old.write)
                old.write = _Write(unit, record.charge.currency, share, {unit: 1} if shares_writes else None)
                old.readable_ns, old.used_ns, old.instance = readable_ns, readable_ns, record.instance
                continue
            write = _Write(unit, record.charge.currency, share, {unit: 1} if shares_writes else None)
            parent = found.marks[place - 1] if place else None
            end_tokens = (place + 1) * found.stride_tokens
            self._parts[mark] = _Part(parent, end_tokens, write, readable_ns, readable_ns, record.instance)

    def _flow(self, writer: str, reader: str, currency: str) -> Flow:
        key = (writer, reader, currency)
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = Flow()
        return flow

    def _settle(self, write: _Write) -> None:
        """Share a write's cost by its uses; the writer keeps what does not divide."""
        if write.uses is None:
            return
        total = sum(write.uses.values())
        for unit, uses in write.uses.items():
            if unit != write.unit:
                flow = self._flow(write.unit, unit, write.currency)
                flow.transfer_nano += write.cost_nano * uses // total
        write.uses = None


def _spans(found: Found, first: int, last: int) -> Iterator[tuple[int | None, int, int]]:
    """Cut the tokens from ``first`` to before ``last`` at the marks; what no mark names is one span at the end."""
    at, stride = first, found.stride_tokens
    for place in range(first // stride if stride else 0, len(found.marks)):
        end = min((place + 1) * stride, last)
        if end <= at:
            break
        yield found.marks[place], at, end
        at = end
    if at < last:
        yield None, at, last
