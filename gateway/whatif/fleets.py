"""Another fleet: recorded requests on simulated engines under the production router (``gateway.replay``).

Engines are simulated, so a fleet is set beside the same requests on the fleet as it was, simulated as well: what a
change makes of it is the difference of the two, and how far the first is from what happened says how much to trust it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from billing.meter import recharge
from billing.prices import PriceBook
from gateway.replay.formats import TraceHeader
from gateway.replay.performance import EnginePerformance
from gateway.replay.recorded import instances_of, trace_row
from gateway.replay.router import RouterOptions
from gateway.replay.simulation import FleetOptions, LoadOptions, Simulation
from gateway.replay.workload import build_workload
from gateway.whatif.scenarios import HAPPENED
from gateway.whatif.usage import with_tiers
from tracing.record import Charge, RequestRecord, Usage

AS_IT_WAS = "simulated"
"""The name of the fleet of the records, simulated."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    """What of a fleet is otherwise. ``None``: as it is."""

    policy: str | None = None
    more_host_tokens: int = 0
    instances: int | None = None


@dataclass(frozen=True, slots=True)
class FleetAsItIs:
    """The fleet of the records, as far as it is known: its engines' speed and sizes, how many, and its policy."""

    performance: EnginePerformance
    instances: int
    policy: str
    pool_tokens: int = 0


def fleet_of(records: Sequence[RequestRecord], performance: EnginePerformance) -> FleetAsItIs:
    """Return the fleet that records name: who answered or could have, and the policy that most were decided by."""
    policies = [record.decision.policy for record in records if record.decision]
    policy = max(set(policies), key=policies.count) if policies else "expected-ttft"
    return FleetAsItIs(performance, instances_of(records), policy)


class SimulatedFleet:
    """A scenario whose usages come out of one simulation of all records. Raises ``ParameterError`` for a bad fleet.

    Cost: some 500 µs a request.
    """

    def __init__(
        self,
        records: Sequence[RequestRecord],
        stride_tokens: int,
        books: Mapping[str, PriceBook],
        fleet: FleetAsItIs,
        change: FleetChange | None = None,
    ) -> None:
        change = change or FleetChange()
        self._books = books
        self._usages: dict[str, Usage] = {}
        self._ttft_s: dict[str, float] = {}
        self.name, self.title = _words(change)
        self.beside = HAPPENED if change == FleetChange() else AS_IT_WAS
        by_model: dict[str, list[RequestRecord]] = {}
        for record in records:
            by_model.setdefault(record.served_model, []).append(record)
        for model in sorted(by_model):
            self._simulate(by_model[model], stride_tokens, fleet, change)

    def usage(self, record: RequestRecord) -> Usage:
        """Return what the simulation gave; of requests that fit no simulated engine, what was."""
        return self._usages.get(record.request_id, record.usage)

    def charge(self, record: RequestRecord, usage: Usage) -> Charge:
        """Return the charge at the prices of its time."""
        if record.charge.basis is None:
            return record.charge
        return recharge(usage, self._books[record.charge.price_version], record.charge.basis)

    def ttft_ns(self, record: RequestRecord) -> int | None:
        """Return the simulated one."""
        ttft_s = self._ttft_s.get(record.request_id)
        return None if ttft_s is None else round(ttft_s * 1e9)

    def _simulate(
        self, records: Sequence[RequestRecord], stride_tokens: int, fleet: FleetAsItIs, change: FleetChange
    ) -> None:
        begin_ns = records[0].stamps.arrived_ns
        header = TraceHeader("recorded", records[0].served_model, stride_tokens, closed=False)
        workload = build_workload(header, (trace_row(n, record, begin_ns) for n, record in enumerate(records)))
        host_tokens = fleet.performance.host_tokens + change.more_host_tokens
        options = FleetOptions(
            replace(fleet.performance, host_tokens=host_tokens), change.instances or fleet.instances, fleet.pool_tokens
        )
        router = RouterOptions(change.policy or fleet.policy)
        for flight in Simulation(workload, options, LoadOptions(), router).run().flights:
            record = records[flight.request.number]
            if not flight.was_refused:
                self._usages[record.request_id] = with_tiers(record.usage, flight.hit_tokens)
                self._ttft_s[record.request_id] = flight.ttft_s


def _words(change: FleetChange) -> tuple[str, str]:
    if change.policy is not None:
        return f"policy-{change.policy}", f"Policy {change.policy}, simulated"
    if change.more_host_tokens:
        return f"host+{change.more_host_tokens}", f"{change.more_host_tokens:,} more host tokens, simulated"
    if change.instances is not None:
        return f"instances-{change.instances}", f"{change.instances} instances, simulated"
    return AS_IT_WAS, "As it was, simulated"
