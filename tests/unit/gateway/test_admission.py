"""Who begins next."""

import pytest

from gateway.admission import Admission, AdmissionOptions, Entry, QueueFull
from gateway.scale import Need


def _entry(tenant: str = "a", tokens: int = 1000, came_s: float = 0.0, **more: object) -> Entry:
    return Entry(tenant, tokens, tokens, came_s, **more)  # type: ignore[arg-type]


def _order(admission: Admission, entries: list[Entry], now_s: float = 1.0) -> list[Entry]:
    for entry in entries:
        admission.offer(entry, now_s)
    order = []
    while admission.waiting:
        for entry in admission.admit(now_s):
            order.append(entry)
            admission.leave(entry, now_s)
    return order


def test_who_comes_to_a_full_queue_is_told_when_to_come_again() -> None:
    admission = Admission(AdmissionOptions(running_limit=1, queue_limit=2))
    first = _entry()
    admission.offer(first, 0.0)
    assert admission.admit(0.0) == [first]
    for _ in range(2):
        admission.offer(_entry(), 0.0)
    with pytest.raises(QueueFull) as full:
        admission.offer(_entry(), 0.0)
    assert full.value.retry_after_s == 2


def test_who_waits_too_long_is_taken_out() -> None:
    admission = Admission(AdmissionOptions(running_limit=1, deadline_s=10))
    running, waiting = _entry(), _entry(came_s=5.0)
    for entry in (running, waiting):
        admission.offer(entry, 5.0)
    admission.admit(5.0)
    assert admission.expired(14.9) == []
    assert admission.oldest_wait_s(14.9) == pytest.approx(9.9)
    assert admission.expired(15.0) == [waiting]
    assert admission.waiting == 0


def test_priorities_are_strict_and_the_most_urgent_of_equals_goes_first() -> None:
    batch, late, soon = _entry(priority=2), _entry(priority=1), _entry(priority=1, objective_s=1.0)
    assert _order(Admission(AdmissionOptions(running_limit=1)), [batch, late, soon]) == [soon, late, batch]


def test_warm_requests_go_first_within_a_quantum_and_not_beyond_it() -> None:
    def order(quantum: int) -> str:
        cold, warm = [_entry("cold") for _ in range(3)], [_entry("warm", warm_share=0.9) for _ in range(3)]
        admission = Admission(AdmissionOptions(running_limit=1, quantum_tokens=quantum))
        return "".join(entry.tenant[0] for entry in _order(admission, [*cold, *warm]))

    assert order(10_000) == "wwwccc"
    assert order(1) in ("wcwcwc", "cwcwcw")


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    admission = Admission(AdmissionOptions(running_limit=1, quantum_tokens=1))
    _order(admission, [_entry("busy") for _ in range(50)])
    order = _order(admission, [*(_entry("busy") for _ in range(4)), *(_entry("new") for _ in range(4))])
    assert {"busy", "new"} == {entry.tenant for entry in order[:2]} == {entry.tenant for entry in order[2:4]}


def test_huge_prompts_have_a_lane_that_holds_nobody_up() -> None:
    admission = Admission(AdmissionOptions(running_limit=8, huge_tokens=50_000, huge_at_once=1))
    huge, small = [_entry("h", 80_000) for _ in range(3)], [_entry("s", 100) for _ in range(3)]
    for entry in [*huge, *small]:
        admission.offer(entry, 0.0)
    assert set(admission.admit(0.0)) == {huge[0], *small}
    admission.leave(huge[0], 5.0)
    assert admission.admit(5.0) == [huge[1]]


def test_runs_wait_for_memory_and_their_later_steps_do_not() -> None:
    options = AdmissionOptions(running_limit=8, memory_tokens=100_000, run_idle_s=60)
    admission = Admission(options)
    one, two, three = (_entry(tokens=45_000, run=run) for run in ("one", "two", "three"))
    for entry in (one, two, three):
        admission.offer(entry, 0.0)
    assert admission.admit(0.0) == [one, two], "the third does not fit"
    admission.leave(one, 1.0)
    step = _entry(tokens=50_000, run="one")
    admission.offer(step, 2.0)
    assert admission.admit(2.0) == [step]
    assert admission.held_tokens == 95_000
    admission.leave(step, 3.0)
    assert admission.admit(62.9) == []
    assert admission.admit(63.0) == [three], "a run that fell idle gave its place back"
    admission.check()


def test_a_run_that_ends_gives_its_place_back_at_once_and_the_only_one_is_never_refused() -> None:
    admission = Admission(AdmissionOptions(running_limit=8, memory_tokens=1000))
    giant, other = _entry(tokens=50_000, run="giant"), _entry(tokens=10, run="other")
    for entry in (giant, other):
        admission.offer(entry, 0.0)
    assert admission.admit(0.0) == [giant]
    admission.leave(giant, 1.0)
    admission.run_ended("giant")
    assert admission.admit(1.0) == [other]


@pytest.mark.parametrize(
    ("need", "replicas"),
    [
        (Need(0, 0.0, 0.0, None), 1),
        (Need(4, 0.0, 0.0, 0.0), 1),
        (Need(4, 0.3, 0.1, 0.4), 2),
        (Need(4, 0.6, 0.5, 0.5), 4),
        (Need(4, 0.9, 0.5, 0.5), 6),
        (Need(4, 0.1, 4.0, None), 8),
        (Need(4, 0.1, 0.0, 0.95), 5),
        (Need(4, 0.5, 0.5, 0.5, queue_s=300.0), 16),
    ],
)
def test_what_binds_most_says_how_many_instances_there_should_be(need: Need, replicas: int) -> None:
    assert need.replicas() == replicas
