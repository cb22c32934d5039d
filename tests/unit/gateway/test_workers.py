"""What workers share: messages, runs, loads and metrics. Each worker here is a mesh of its own in one process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.run_ends import RunEnds, Why
from gateway.workers.mesh import Mesh, socket_pairs
from gateway.workers.place import WorkerPlace
from gateway.workers.shared_loads import SharedLoads
from gateway.workers.shared_metrics import SharedMetrics, bury
from gateway.workers.shared_runs import SharedRunLinker
from gateway.workers.turn import Turn
from gateway.workers.worker import Worker
from tracing.messages import message_chain
from tracing.runs import RunEvidence


@pytest.fixture
def lines() -> Iterator[dict[tuple[int, int], socket.socket]]:
    pairs = socket_pairs(3)
    yield pairs
    for end in pairs.values():
        end.close()


def mesh_of(number: int, pairs: dict[tuple[int, int], socket.socket]) -> Mesh:
    return Mesh({b: end for (a, b), end in pairs.items() if a == number})


async def test_messages_come_whole_in_order_and_to_everybody_else(
    lines: dict[tuple[int, int], socket.socket],
) -> None:
    meshes = [mesh_of(number, lines) for number in range(3)]
    heard: list[list[tuple[int, object]]] = [[], [], []]
    for number, mesh in enumerate(meshes):
        mesh.on("word", lambda who, what, number=number: heard[number].append((who, what)))
        mesh.open()
    meshes[0].tell_soon("word", 1)
    meshes[0].tell("word", "x" * 50_000)  # what waited goes first
    meshes[0].tell("nobody listens to this")
    meshes[1].tell_soon("word", 3)
    async with asyncio.timeout(5):
        while [len(one) for one in heard] != [1, 2, 3]:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert heard == [[(1, 3)], [(0, 1), (0, "x" * 50_000)], [(0, 1), (0, "x" * 50_000), (1, 3)]]
    for mesh in meshes:
        mesh.close()


async def test_a_worker_that_hangs_holds_nobody_up_and_its_successor_hears_what_still_fits(
    lines: dict[tuple[int, int], socket.socket],
) -> None:
    speaker = mesh_of(0, lines)
    speaker.open()
    for number in range(5000):
        speaker.tell("word", number, "x" * 1000)
    assert speaker.dropped > 0
    successor, heard = mesh_of(1, lines), list[int]()
    successor.on("word", lambda _, number, text: heard.append(number))
    successor.catch_up()
    assert heard == list(range(len(heard)))
    assert len(heard) > 50
    speaker.tell("word", -1, "")
    successor.catch_up()
    assert heard[-1] == -1
    speaker.close()


def turn(number: int, history: list[dict[str, object]]) -> tuple[RunEvidence, list[dict[str, object]]]:
    evidence = RunEvidence("k", f"req-{number}", number * 10**9, message_hashes=message_chain(history))
    return evidence, [*history, {"role": "assistant", "content": f"answer {number}"}]


def test_a_run_goes_on_in_whichever_worker_its_next_step_comes_to(
    lines: dict[tuple[int, int], socket.socket], tmp_path: Path
) -> None:
    linkers = [SharedRunLinker(mesh_of(number, lines), Turn(tmp_path / "turn")) for number in range(3)]
    history: list[dict[str, object]] = [{"role": "user", "content": "go"}]
    twin: list[dict[str, object]] = [{"role": "user", "content": "go"}]
    runs, twins = [], []
    for number in range(1, 13):
        for at, (conversation, found) in enumerate(((history, runs), (twin, twins))):
            linker = linkers[(number + at) % 3]
            evidence, answered = turn(number * 10 + at, conversation)
            link = linker.link(evidence)
            found.append((link.run_id, link.step))
            chain = message_chain(answered)
            linker.answered(link, evidence.request_id, (), chain, key_id="k", message=answered[-1])
            conversation[:] = [*answered, {"role": "user", "content": f"more {number}"}]
    assert [step for _, step in runs] == list(range(1, 13))
    assert len({run for run, _ in runs}) == 1
    assert len({run for run, _ in twins}) == 1
    assert runs[0][0] != twins[0][0]
    for linker in linkers:
        linker.check()


def test_steps_that_come_to_different_workers_at_one_moment_get_different_numbers(
    lines: dict[tuple[int, int], socket.socket], tmp_path: Path
) -> None:
    steps: list[int] = []
    begin = threading.Barrier(3)

    def work(number: int) -> None:
        linker = SharedRunLinker(mesh_of(number, lines), Turn(tmp_path / "turn"))
        begin.wait()
        for at in range(300):
            evidence = RunEvidence("k", f"req-{number}-{at}", 10**9, explicit_run_id="one")
            steps.append(linker.link(evidence).step)
        begin.wait()
        linker._mesh.catch_up()
        linker.check()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps) == list(range(1, 901))


class Ends:
    """Hears of ended runs, at one worker."""

    def __init__(self) -> None:
        self.told = list[str]()

    def run_ended(self, run: str, instances: frozenset[str]) -> None:
        self.told.append(run)


async def test_every_worker_hears_of_a_runs_end_and_of_the_steps_that_come_to_others(
    lines: dict[tuple[int, int], socket.socket], tmp_path: Path
) -> None:
    clock, workers = [0.0], []
    for number in range(2):
        own = {other: end for (one, other), end in lines.items() if one == number}
        worker, heard = Worker(WorkerPlace(number, 2, 0, tmp_path, own)), Ends()
        ends = RunEnds([heard], 10.0, CollectorRegistry(), lambda: clock[0], worker.run_ended)
        worker.linker.tell(ends)
        worker.open({}, ends, lambda: None)
        workers.append((worker, ends, heard))
    (first, at_first, heard), (second, at_second, other) = workers
    for run in ("k/a", "k/b", "k/c"):
        for ends in (at_first, at_second):
            ends.begun(run)
            ends.over(run, [])
    at_first.end("k/a", Why.TOLD)
    second.mesh.catch_up()
    assert (heard.told, other.told) == (["k/a"], ["k/a"])
    clock[0] = 9.0
    second.linker.link(RunEvidence("k", "r", 1, explicit_run_id="b"))
    first.mesh.catch_up()
    clock[0] = 12.0
    at_first.end_idle()
    assert heard.told == ["k/a", "k/c"]  # the other one goes on elsewhere
    for worker, _, _ in workers:
        worker.mesh.close()


class CountedLoad:
    """Stands for the policy's load, whose reservations also learn from times."""

    def __init__(self) -> None:
        self.running = self.queued_tokens = 0

    def reserve(self, tokens: int) -> CountedReservation:
        self.running += 1
        self.queued_tokens += tokens
        return CountedReservation(self, tokens)


class CountedReservation:
    def __init__(self, load: CountedLoad, tokens: int) -> None:
        self._load, self.tokens, self._is_over = load, tokens, False

    def answered(self, *_: float) -> None:
        self._load.queued_tokens -= self.tokens
        self.tokens = 0

    def release(self, *_: float) -> None:
        self.answered()
        if not self._is_over:
            self._is_over = True
            self._load.running -= 1


async def test_loads_are_those_of_all_workers_and_a_dead_one_leaves_none(
    lines: dict[tuple[int, int], socket.socket],
) -> None:
    loads = [CountedLoad() for _ in range(3)]
    meshes = [mesh_of(number, lines) for number in range(3)]
    shared = [SharedLoads(mesh, {"e0": load}.get) for mesh, load in zip(meshes, loads, strict=True)]

    def seen() -> list[tuple[int, int]]:
        for mesh in meshes:
            mesh.tell("nothing")  # and with it what waits for the round's end
        for mesh in meshes:
            mesh.catch_up()
        return [(load.running, load.queued_tokens) for load in loads]

    first = shared[0].reserve("e0", loads[0], 100)
    shared[1].reserve("e0", loads[1], 50)
    assert seen() == [(2, 150)] * 3
    first.answered(1.0)
    first.answered(1.0)
    assert seen() == [(2, 50)] * 3
    first.release(2.0)
    first.release(2.0)
    assert seen() == [(1, 50)] * 3
    meshes[1], loads[1] = mesh_of(1, lines), CountedLoad()  # worker 1 died, and another comes in its place
    SharedLoads(meshes[1], {"e0": loads[1]}.get).open()
    assert seen() == [(0, 0)] * 3


def value(text: bytes, name: str) -> float:
    return sum(float(line.rpartition(b" ")[2]) for line in text.splitlines() if line.startswith(name.encode()))


@pytest.mark.requirement("R23")
def test_a_sum_over_workers_never_falls_whoever_is_asked_and_whoever_dies(tmp_path: Path) -> None:
    workers, common = [], CollectorRegistry()
    Counter("keepwarm_ledger_requests", "Of all", registry=common).inc(7)
    for number in range(3):
        own = CollectorRegistry()
        requests = Counter("keepwarm_requests", "Requests", ("outcome",), registry=own)
        seconds = Histogram("keepwarm_request_seconds", "Times", registry=own)
        Gauge("keepwarm_in_flight", "In flight", registry=own).set(number)
        Gauge("keepwarm_instance_up", "Up", ("instance",), registry=own).labels("e0").set(1)
        workers.append((SharedMetrics(tmp_path, number, own, common), requests, seconds))
    for number, (shared, _, _) in enumerate(workers):
        shared._path = tmp_path / f"{number}-{1000 + number}"  # as if each were a process of its own
    shown = 0.0
    for turn_ in range(30):
        shared, requests, seconds = workers[turn_ % 3]
        requests.labels("ok").inc()
        seconds.observe(0.1)
        text = workers[(turn_ + 1) % 3][0].render()
        assert value(text, "keepwarm_requests_total") >= shown
        shown = value(text, "keepwarm_requests_total")
    for shared, _, _ in workers:
        text = shared.render()
    assert value(text, "keepwarm_requests_total") == value(text, "keepwarm_request_seconds_count") == 30
    assert value(text, "keepwarm_in_flight") == 0 + 1 + 2
    assert value(text, 'keepwarm_instance_up{instance="e0"}') == 1
    assert value(text, "keepwarm_ledger_requests_total") == 7
    bury(tmp_path, 1, 1001)
    bury(tmp_path, 2, 1002)
    text = workers[0][0].render()
    assert value(text, "keepwarm_requests_total") == 30
    assert value(text, "keepwarm_in_flight") == 0
