"""A run in outline: one light row a step, from the columns alone, so that a run of thousands of steps opens at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tracing.record import RequestRecord
from tracing.store_lists import RunSummary, summary


class StepOutline(NamedTuple):
    """One request of a run. ``hit_tokens``: device, host, disk, pool, unknown."""

    step: int
    request_id: str
    arrived_ns: int
    outcome: str
    model: str
    prompt_tokens: int
    hit_tokens: tuple[int, int, int, int, int]
    output_tokens: int
    ttft_ns: int | None


@dataclass(frozen=True, slots=True)
class RunOutline:
    """A run's exact sums and its steps in order."""

    summary: RunSummary
    steps: Sequence[StepOutline]


def outline(reader: sqlite3.Connection, tenant: str, run_id: str) -> RunOutline | None:
    """The outline of a run, ``None`` where it has no record. Cost: about 5 µs a step."""
    rows = reader.execute(
        "SELECT step, request_id, arrived_ns, outcome, model, prompt_tokens, hit_device_tokens, hit_host_tokens,"
        " hit_disk_tokens, hit_pool_tokens, hit_unknown_tokens, output_tokens, ttft_ns FROM records"
        " WHERE tenant = ? AND run_id = ? ORDER BY step, seq",
        (tenant, run_id),
    ).fetchall()
    if not rows:
        return None
    steps = [StepOutline(*row[:6], row[6:11], *row[11:]) for row in rows]
    return RunOutline(summary(reader, tenant, run_id), steps)


def step_outline(record: RequestRecord) -> StepOutline:
    """The same of a record of a run."""
    usage = record.usage
    return StepOutline(
        record.link.step if record.link else 1,
        record.request_id,
        record.stamps.arrived_ns,
        record.outcome.value,
        record.model,
        usage.prompt_tokens,
        (
            usage.hit_device_tokens,
            usage.hit_host_tokens,
            usage.hit_disk_tokens,
            usage.hit_pool_tokens,
            usage.hit_unknown_tokens,
        ),
        usage.output_tokens,
        record.stamps.ttft_ns,
    )
