"""When a run has ended, and that nobody is told of it too early, twice or not at all."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway import run_ends
from gateway.errors import BadRequest
from gateway.run_ends import RunEnds, Why, ends_run, run_name
from gateway.span_ends import SpanEnds
from tracing.received import ReceivedSpan
from tracing.runs import RunEvidence, RunLinker

A, B = run_name("k", "a"), run_name("k", "b")


class Heard:
    """Hears of ends, at a clock that a test sets."""

    def __init__(self, idle_s: float = 100.0) -> None:
        self.now_s, self.told = 0.0, list[tuple[str, frozenset[str]]]()
        self.others = list[tuple[str, str]]()
        self.registry = CollectorRegistry()
        tell = lambda run, why: self.others.append((run, why))  # noqa: E731
        self.ends = RunEnds([self], idle_s, self.registry, lambda: self.now_s, tell)

    def run_ended(self, run: str, instances: frozenset[str]) -> None:
        self.told.append((run, instances))

    def why(self, why: Why) -> float | None:
        return self.registry.get_sample_value("keepwarm_runs_ended_total", {"why": why.value})


def test_an_end_that_was_told_is_heard_when_the_last_request_is_over() -> None:
    heard = Heard()
    heard.ends.begun(A)
    heard.ends.begun(A)
    heard.ends.end(A, Why.TOLD)
    heard.ends.over(A, ["x"])
    assert not heard.told
    heard.ends.over(A, ["y"])
    assert (heard.told, len(heard.ends)) == ([(A, frozenset({"x", "y"}))], 0)
    assert heard.others == [(A, "told")]
    assert heard.why(Why.TOLD) == 1
    heard.ends.end(A, Why.TOLD)
    assert len(heard.told) == 1


def test_a_run_that_goes_on_has_not_ended() -> None:
    heard = Heard()
    heard.ends.begun(A)
    heard.ends.end_here(A, Why.CALL_ANSWERED)
    heard.ends.begun(A)  # an agent that works in the background: its call was answered at once
    for _ in range(2):
        heard.ends.over(A, [])
    assert (heard.told, heard.others) == ([], [])


def test_a_run_of_which_nothing_came_for_long_has_ended_wherever_its_requests_came() -> None:
    heard = Heard(idle_s=100.0)
    for run in (A, B):
        heard.ends.begun(run)
        heard.ends.over(run, ["x"])
    heard.now_s = 60.0
    heard.ends.linked("k", "a")  # another worker has it now
    heard.now_s = 100.0
    heard.ends.end_idle()
    assert [run for run, _ in heard.told] == [B]
    heard.now_s = 160.0
    heard.ends.end_idle()
    assert [run for run, _ in heard.told] == [B, A]
    assert heard.why(Why.IDLE) == 2


def test_a_request_that_takes_longer_than_runs_may_be_idle_keeps_its_run() -> None:
    heard = Heard(idle_s=1.0)
    heard.ends.begun(A)
    heard.now_s = 50.0
    heard.ends.end_idle()
    assert not heard.told
    heard.ends.over(A, [])
    heard.ends.end_idle()
    assert not heard.told


def test_no_more_runs_are_followed_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ends, "_MOST_RUNS", 3)
    heard = Heard()
    for number in range(5):
        heard.ends.begun(str(number))
        if number < 2:
            heard.ends.over(str(number), [])
    assert [run for run, _ in heard.told] == ["0", "1"]
    assert len(heard.ends) == 3
    heard.ends.begun("5")  # all of them are under way: one is not followed any more, and its end is nobody's
    heard.ends.over("2", [])
    assert len(heard.ends) == 3


@given(st.lists(st.tuples(st.sampled_from("bbboei"), st.integers(0, 3)), max_size=60))
def test_ends_are_heard_once_a_life_and_never_with_requests_under_way(steps: list[tuple[str, int]]) -> None:
    heard, under_way = Heard(idle_s=5.0), Counter[str]()
    since = Counter[str]()  # requests since the run was last told of
    for what, number in steps:
        run, told = str(number), len(heard.told)
        heard.now_s += 1.0
        if what == "b":
            heard.ends.begun(run)
            under_way[run] += 1
            since[run] += 1
        elif what == "o" and under_way[run]:
            under_way[run] -= 1
            heard.ends.over(run, [])
        elif what == "e":
            heard.ends.end(run, Why.TOLD)
        elif what == "i":
            heard.ends.end_idle()
        for ended, _ in heard.told[told:]:
            assert not under_way[ended]
            assert since.pop(ended)
    for run, count in under_way.items():
        for _ in range(count):
            heard.ends.over(run, [])
    heard.now_s += 100.0
    heard.ends.end_idle()
    assert not len(heard.ends)
    assert {run for run, _ in heard.told} >= set(since)


def test_what_the_header_may_say() -> None:
    assert [ends_run({"x-keepwarm-run-end": word}) for word in ("true", "1", "True", "false", "0", "")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert not ends_run({})
    with pytest.raises(BadRequest, match="x-keepwarm-run-end must be true or false"):
        ends_run({"x-keepwarm-run-end": "perhaps"})


def span(parent: str | None = None, trace: str = "t" * 32, **attributes: str | bool) -> ReceivedSpan:
    named = {name.replace("_", "."): value for name, value in attributes.items()}
    return ReceivedSpan(trace, "s" * 16, parent, "agent", 1, 1, 2, attributes=dict(named))


def test_a_span_ends_the_run_that_it_names_or_those_of_its_trace() -> None:
    linker, heard = RunLinker(), Heard()
    linker.tell(heard.ends)
    for run_id in ("a", "b"):
        linker.link(RunEvidence("k", run_id, 1, explicit_run_id=run_id, trace_id="t" * 32))
        heard.ends.begun(run_name("k", run_id))
        heard.ends.over(run_name("k", run_id), [])
    by_word = SpanEnds(heard.ends, linker, by_root=False)
    by_word.received("k", [span(), span(keepwarm_run_end="true"), span(parent="p", keepwarm_run_id="a")])
    assert not heard.told  # a text is no truth, and nothing was said of an end
    by_word.received("other", [span(keepwarm_run_end=True)])
    assert not heard.told
    by_word.received("k", [span(parent="p", keepwarm_run_end=True, keepwarm_run_id="a")])
    assert [run for run, _ in heard.told] == [A]
    by_root = SpanEnds(heard.ends, linker, by_root=True)
    by_root.received("k", [span(parent="p")])
    assert len(heard.told) == 1
    by_root.received("k", [span()])
    assert [run for run, _ in heard.told] == [A, B]
    assert heard.why(Why.SPAN) == 2
