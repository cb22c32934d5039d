"""From the numbers that an API reports to disjoint token classes, with an alarm for whatever does not add up.

The shapes differ (``billing.usage`` knows them); what is done with their numbers does not, and is written here once:

* a number that is absent, null, negative or no integer is *missing*, and missing is never 0;
* hits and writes are subsets of the prompt and never overlap: what would overlap is clamped, and the clamp is an alarm;
* a tier split and a total that disagree are brought to the total, and that is an alarm too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tracing.record import HitSource, Usage, UsageSource

#: Beyond this a number is no token count, whatever it is.
MAX_COUNT = 10**9
#: Nor does one answer run a tool so often. A thousand bills of a billion searches are more money than sums hold.
MAX_TOOL_USES = 10**6
#: No usage object has so many fields that matter: more alarms would say nothing more and swell the request's row.
MAX_PROBLEMS = 64


class ProblemCode(StrEnum):
    """What was wrong with a usage object. The set is closed: it labels a counter."""

    MISSING = "missing"  # a count that the bill needs is not there
    NOT_A_COUNT = "not_a_count"  # a field holds no integer, or one that is no count of tokens
    HITS_EXCEED_PROMPT = "hits_exceed_prompt"
    WRITES_EXCEED_PROMPT = "writes_exceed_prompt"
    REASONING_EXCEEDS_OUTPUT = "reasoning_exceeds_output"
    HITS_DISAGREE = "hits_disagree"  # two fields tell different numbers of cached tokens
    TIERS_DISAGREE = "tiers_disagree"  # the tiers do not sum to the total of the hits
    WRITES_DISAGREE = "writes_disagree"  # the lifetimes do not sum to the total of the writes
    UNKNOWN_TOOL = "unknown_tool"  # the API ran a tool that no price book has a name for
    TOTAL_DISAGREES = "total_disagrees"  # the parts do not sum to the reported total


@dataclass(frozen=True, slots=True)
class UsageProblem:
    """One alarm: what kind, and the numbers."""

    code: ProblemCode
    detail: str

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class UsageReading(NamedTuple):
    """What a usage object says: the disjoint classes, and everything about it that raised an alarm."""

    usage: Usage
    problems: tuple[UsageProblem, ...]


class TierHits(msgspec.Struct, frozen=True, gc=False):
    """Hit tokens by tier, as an engine reports them; ``unknown`` are hits whose tier it does not tell."""

    device: int = 0
    host: int = 0
    disk: int = 0
    pool: int = 0
    unknown: int = 0

    @property
    def total(self) -> int:
        """All hits."""
        return self.device + self.host + self.disk + self.pool + self.unknown

    def at_most(self, total: int) -> TierHits:
        """Keep ``total`` hits, dropping from the slowest tier first."""
        kept, room = [], max(total, 0)
        for tokens in (self.device, self.host, self.disk, self.pool, self.unknown):
            kept.append(min(tokens, room))
            room -= kept[-1]
        return TierHits(*kept)


class Writes(msgspec.Struct, frozen=True, gc=False):
    """Tokens billed as written to the cache, by lifetime; ``plain`` where the API has one or doesn't say which."""

    plain: int = 0
    five_minutes: int = 0
    one_hour: int = 0

    @property
    def total(self) -> int:
        """All writes."""
        return self.plain + self.five_minutes + self.one_hour

    def at_most(self, total: int) -> Writes:
        """Keep ``total`` writes, dropping the longest-lived (the dearest) first."""
        kept, room = [], max(total, 0)
        for tokens in (self.plain, self.five_minutes, self.one_hour):
            kept.append(min(tokens, room))
            room -= kept[-1]
        return Writes(*kept)


_NO_WRITES = Writes()


class Counts:
    """Reads counts out of one usage object and collects what is wrong with it."""

    def __init__(self) -> None:
        self.problems: list[UsageProblem] = []

    def alarm(self, code: ProblemCode, detail: str) -> None:
        """Record a problem, unless there are so many that one more says nothing."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(UsageProblem(code, detail))

    def read(self, source: Mapping[str, object] | None, field: str, most: int = MAX_COUNT) -> int | None:
        """Return the count in ``field``, or ``None`` where it is absent, null, negative, absurd or no integer."""
        value = None if source is None else source.get(field)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            self.alarm(ProblemCode.NOT_A_COUNT, f"{field} is {value!r:.40}")
            return None
        return value

    def agreed(self, named: Mapping[str, int | None]) -> int | None:
        """Return the one number of hits that the fields tell; where they differ the largest, with an alarm."""
        told = {field: value for field, value in named.items() if value is not None}
        if len(set(told.values())) > 1:
            self.alarm(ProblemCode.HITS_DISAGREE, ", ".join(f"{field} {value}" for field, value in told.items()))
        return max(told.values(), default=None)

    def check_total(self, reported: int | None, parts: int) -> None:
        """Alarm when the reported total is not the sum of the parts."""
        if reported is not None and reported != parts:
            self.alarm(ProblemCode.TOTAL_DISAGREES, f"total {reported}, parts {parts}")

    def close(
        self,
        *,
        prompt: int | None,
        output: int | None,
        cached: int | None = None,
        tiers: TierHits | None = None,
        writes: Writes = _NO_WRITES,
        reasoning: int | None = None,
        tool_uses: tuple[tuple[str, int], ...] = (),
        source: UsageSource = UsageSource.ENGINE,
    ) -> UsageReading:
        """Split ``prompt`` (all prompt tokens, hits and writes included) into disjoint classes.

        Without a prompt or an output count the reading is ``MISSING``: it keeps what is known and cannot be billed.
        """
        for name, value in (("prompt", prompt), ("output", output)):
            if value is None:
                self.alarm(ProblemCode.MISSING, f"no {name} count")
        if prompt is None or output is None:
            known = Usage(fresh_tokens=prompt or 0, output_tokens=output or 0, source=UsageSource.MISSING)
            known = replace(known, tool_uses=tool_uses)
            return UsageReading(known, tuple(self.problems))
        hits, hit_source = self._hits(cached, tiers)
        if hits.total > prompt:
            self.alarm(ProblemCode.HITS_EXCEED_PROMPT, f"{hits.total} hits in a prompt of {prompt}")
            hits = hits.at_most(prompt)
        if hits.total + writes.total > prompt:
            detail = f"{writes.total} written beside {hits.total} hits in a prompt of {prompt}"
            self.alarm(ProblemCode.WRITES_EXCEED_PROMPT, detail)
            writes = writes.at_most(prompt - hits.total)
        reasoning = reasoning or 0
        if reasoning > output:
            self.alarm(ProblemCode.REASONING_EXCEEDS_OUTPUT, f"{reasoning} of {output}")
            reasoning = output
        usage = Usage(
            fresh_tokens=prompt - hits.total - writes.total,
            hit_device_tokens=hits.device,
            hit_host_tokens=hits.host,
            hit_disk_tokens=hits.disk,
            hit_pool_tokens=hits.pool,
            hit_unknown_tokens=hits.unknown,
            output_tokens=output,
            reasoning_tokens=reasoning,
            source=source,
            write_tokens=writes.plain,
            write_5m_tokens=writes.five_minutes,
            write_1h_tokens=writes.one_hour,
            hit_source=hit_source,
            tool_uses=tool_uses,
        )
        return UsageReading(usage, tuple(self.problems))

    def _hits(self, cached: int | None, tiers: TierHits | None) -> tuple[TierHits, HitSource]:
        """Bring the total and the tier split together; the total has the last word."""
        if tiers is None:
            known = HitSource.UNKNOWN if cached is None else HitSource.TOTAL
            return TierHits(unknown=cached or 0), known
        if cached is not None and tiers.total != cached:
            self.alarm(ProblemCode.TIERS_DISAGREE, f"tiers sum to {tiers.total}, the total is {cached}")
            missing = max(cached - tiers.total, 0)
            tiers = TierHits(tiers.device, tiers.host, tiers.disk, tiers.pool, tiers.unknown + missing)
            tiers = tiers.at_most(cached)
        return tiers, HitSource.REPORTED
