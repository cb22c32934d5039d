"""Queues that are bounded, fair and exact, whatever comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import Admission, AdmissionOptions, Entry, QueueFull

_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.sampled_from("abc"),
            st.integers(0, 90_000),
            st.sampled_from([None, 1, 2, 3]),
            st.integers(0, 2),
        ),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("pass"), st.floats(0, 50)),
        st.tuples(st.just("expire")),
        st.tuples(st.just("run_ended"), st.sampled_from([1, 2, 3])),
    ),
    max_size=80,
)
_OPTIONS = st.builds(
    AdmissionOptions,
    running_limit=st.integers(1, 4),
    queue_limit=st.integers(1, 8),
    deadline_s=st.just(30.0),
    huge_tokens=st.just(50_000),
    huge_at_once=st.integers(1, 2),
    memory_tokens=st.sampled_from([None, 1000, 100_000]),
    run_idle_s=st.just(20.0),
)


@given(_OPTIONS, _STEPS)
def test_every_request_begins_once_or_leaves_and_no_limit_is_passed(
    options: AdmissionOptions, steps: list[tuple[object, ...]]
) -> None:
    admission, now_s, entries, begun = Admission(options), 0.0, list[Entry](), set[Entry]()
    for kind, *details in steps:
        if kind == "offer":
            tenant, tokens, run, priority = details
            entry = Entry(tenant, tokens, tokens, now_s, run, priority)  # type: ignore[arg-type]
            if admission.waiting < options.queue_limit:
                admission.offer(entry, now_s)
                entries.append(entry)
                continue
            with pytest.raises(QueueFull) as full:
                admission.offer(entry, now_s)
            assert 1 <= full.value.retry_after_s <= 60
        elif kind == "leave" and entries:
            admission.leave(entries[details[0] % len(entries)], now_s)  # type: ignore[operator]
        elif kind == "pass":
            now_s += details[0]  # type: ignore[operator]
        elif kind == "expire":
            assert all(entry.is_over and not entry.has_begun for entry in admission.expired(now_s))
        elif kind == "run_ended":
            admission.run_ended(details[0])  # type: ignore[arg-type]
        for entry in admission.admit(now_s):
            assert entry not in begun, "it began twice"
            assert not entry.is_over, "it had left"
            begun.add(entry)
        admission.check()
        if admission.waiting and not admission.running:
            assert admission.held_tokens, "somebody waits, and nobody is served or keeps a place"
    for entry in entries:
        admission.leave(entry, now_s)
        admission.leave(entry, now_s)
    admission.check()
    assert (admission.running, admission.huge_running, admission.waiting) == (0, 0, 0)


@given(st.integers(2, 5), st.lists(st.integers(100, 5000), min_size=30, max_size=60))
def test_tenants_that_always_ask_get_alike_however_much_one_of_them_asks(tenants: int, sizes: list[int]) -> None:
    """One tenant sends ten times as many requests; after any time all have had the same tokens, but for a quantum and
    a request."""
    options = AdmissionOptions(running_limit=1, queue_limit=10_000, quantum_tokens=1000)
    admission, had = Admission(options), [0] * tenants
    for place, tokens in enumerate(sizes):
        for tenant in range(tenants):
            for _ in range(10 if tenant == 0 else 1):
                admission.offer(Entry(str(tenant), tokens, tokens, float(place)), float(place))
    for _ in range(len(sizes)):
        (entry,) = admission.admit(100.0)
        had[int(entry.tenant)] += entry.new_tokens
        admission.leave(entry, 100.0)
    assert max(had) - min(had) <= 1000 + 2 * max(sizes)
