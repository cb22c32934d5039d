"""A short form of ``python -m tests.sim``, and that it would notice."""

import pytest

from gateway.policy.load import Load
from gateway.routing import POLICIES
from tests.sim.fleet import Options, Simulation

_SHORT = Options(requests=500, instances=16, fault_every_s=0.7)


@pytest.mark.parametrize("seed", range(4))
def test_no_request_is_lost_or_doubled_while_instances_break(seed: int) -> None:
    summary = Simulation(Options(_SHORT.requests, _SHORT.instances, seed, fault_every_s=_SHORT.fault_every_s)).run()
    assert sum(summary.ends.values()) == _SHORT.requests
    assert summary.ends["answered"] > 0.9 * _SHORT.requests
    assert len(summary.faults) >= 5
    assert summary.attempts > _SHORT.requests, "some went on elsewhere"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_the_same_books(policy: str) -> None:
    options = Options(200, 8, 1, policy, fault_every_s=0.7)
    assert sum(Simulation(options).run().ends.values()) == 200


def test_the_same_seed_gives_the_same_run() -> None:
    options = Options(200, 8, 5, fault_every_s=0.7)
    assert Simulation(options).run() == Simulation(options).run()


def test_a_leak_is_noticed_and_its_seed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Load._leave

    def leaky(load: Load, reservation: object) -> bool:
        load.running += int(load.running == 3)
        return leave(load, reservation)  # type: ignore[arg-type]

    monkeypatch.setattr(Load, "_leave", leaky)
    with pytest.raises(AssertionError, match="seed 3, at"):
        Simulation(Options(500, 4, 3, fault_every_s=0.7)).run()
