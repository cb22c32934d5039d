"""How many prefill and decode instances a separated fleet would need for the load that a run showed.

An estimate from the run's own work, not another simulation: the hits stay those of the replayed fleet, instances are
fully used, and the KV of every prompt moves once from its prefill to its decode instance. A decode instance runs the
largest batch whose step meets the TPOT objective and whose contexts fit on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.replay.engine_model import Flight
from gateway.replay.performance import EnginePerformance


@dataclass(frozen=True, slots=True)
class Separation:
    """Instances at full use. ``None`` where no batch meets the objective or fits."""

    prefill_instances: float
    decode_instances: float | None
    decode_batch: int
    transfer_bytes_per_s: float

    @property
    def prefill_per_decode(self) -> float | None:
        """Prefill instances for each decode instance."""
        return self.prefill_instances / self.decode_instances if self.decode_instances else None


def separate(
    flights: Sequence[Flight], performance: EnginePerformance, span_s: float, tpot_objective_s: float
) -> Separation:
    """Return what ``flights``, which came within ``span_s``, would need."""
    steps = sum(flight.request.output_tokens - 1 for flight in flights)
    weighted = sum(
        (flight.request.output_tokens - 1) * (flight.request.prompt_tokens + flight.request.output_tokens / 2)
        for flight in flights
    )
    context = weighted / steps if steps else 0.0
    batch = _largest_batch(performance, context, tpot_objective_s)
    prompts = sum(flight.request.prompt_tokens for flight in flights)
    return Separation(
        prefill_instances=sum(flight.prefill_s for flight in flights) / span_s,
        decode_instances=steps * performance.decode_step_s(batch, batch * context) / batch / span_s if batch else None,
        decode_batch=batch,
        transfer_bytes_per_s=prompts * performance.kv_bytes_per_token / span_s,
    )


def _largest_batch(performance: EnginePerformance, context: float, tpot_objective_s: float) -> int:
    for batch in range(performance.running_limit, 0, -1):
        fits = batch * context <= performance.device_tokens
        if fits and performance.decode_step_s(batch, batch * context) <= tpot_objective_s:
            return batch
    return 0
