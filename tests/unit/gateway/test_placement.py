"""Eviction policies replayed on traces: against a naive cache, against the bound, and with the end of runs known."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.replay.formats import TraceHeader, TraceRow
from gateway.replay.placement import Placement, arrivals, clairvoyant_tokens, place
from gateway.replay.workload import Workload, build_workload, load_workload
from kvstore.policies.named import POLICIES
from tests import make_traces

TRACES = Path(make_traces.__file__).parent / "traces"
BLOCK = 16
CAPACITIES = (2_000, 10_000, 40_000)


def workload_of(prompts: list[tuple[int, list[int]]], *, closed: bool = False) -> Workload:
    """Return a workload of (session, block ids)."""
    header = TraceHeader("keepwarm-requests-1", "made", BLOCK, closed)
    rows = [
        TraceRow(i + 1, session, 0, float(i), 1.0, BLOCK * len(blocks), 1, 0, blocks)
        for i, (session, blocks) in enumerate(prompts)
    ]
    return build_workload(header, rows, segment_tokens=BLOCK)


def naive_lru(workload: Workload, capacity_tokens: int) -> int:
    """Return the hit tokens of a list that is searched: prompts front to back, given up from the back of the oldest."""
    kept: list[int] = []  # the most recent first, a prefix before its suffix
    hits = 0
    for request in workload.requests:
        known = list(itertools.takewhile(kept.__contains__, request.path))
        hits += BLOCK * len(known)
        kept = [*request.path, *(page for page in kept if page not in request.path)][: capacity_tokens // BLOCK]
    return hits


def test_lru_is_what_a_naive_one_is() -> None:
    rng = random.Random(3)
    prompts = []
    for _ in range(200):
        family, length = rng.randrange(6), rng.randint(1, 8)
        prompts.append((-1, [100 * family + depth for depth in range(length)]))
    workload = workload_of(prompts)
    for pages in (8, 12, 20):
        placement = place(workload, workload.requests, {}, pages * BLOCK, run_ends=False)
        assert round(placement.hits["lru"] * workload.prompt_tokens) == naive_lru(workload, pages * BLOCK)


@pytest.mark.parametrize("name", ["agents.rst.gz", "chat.jsonl"])
def test_no_policy_beats_the_bound_and_all_see_everything_in_room_enough(name: str) -> None:
    workload = load_workload(TRACES / name, 256)
    order = arrivals(workload, 8)
    assert sorted(request.number for request in order) == list(range(len(workload.requests)))
    for capacity in CAPACITIES:
        placement = place(workload, order, POLICIES, capacity, run_ends=False)
        assert set(placement.hits) == set(POLICIES)
        assert max(placement.hits.values()) <= placement.clairvoyant
    roomy = place(workload, order, POLICIES, 1 << 40, run_ends=True)
    assert set(roomy.hits.values()) == {roomy.clairvoyant}
    assert roomy.gap_closed("arc") is None


def test_the_bound_gives_up_what_is_wanted_last() -> None:
    workload = workload_of([(-1, [1]), (-1, [2]), (-1, [3]), (-1, [2]), (-1, [1])])
    assert clairvoyant_tokens(workload, workload.requests, 2 * BLOCK) == 2 * BLOCK
    assert place(workload, workload.requests, {}, 2 * BLOCK, run_ends=False).hits["lru"] == pytest.approx(1 / 5)


def test_the_pages_of_ended_runs_make_room_first() -> None:
    """A run of one long prompt ends; another, paused meanwhile, comes back to its own."""
    prompts = [(1, [1, 2, 3]), (2, [11, 12, 13]), (3, [21, 22, 23]), (1, [1, 2, 3, 4])]
    workload = workload_of(prompts, closed=True)
    order = workload.requests
    placement = place(workload, order, {}, 7 * BLOCK, run_ends=True)
    assert placement.hits["lru"] < placement.hits["lru+ends"] == placement.clairvoyant


def test_the_share_of_the_gap() -> None:
    placement = Placement(1000, clairvoyant=0.5, hits={"lru": 0.1, "arc": 0.2, "lfu": 0.0})
    assert placement.gap_closed("arc") == pytest.approx(0.25)
    assert placement.gap_closed("lfu") == pytest.approx(-0.25)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "placement.json"
    words = ["replay", str(TRACES / "chat.jsonl"), "--store", "learned,arc", "--store-tokens", "5k,20k"]
    assert main([*words, "--json", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == ["tokens", "lru", "learned", "arc", "clairvoyant"]
    assert [line.split()[0] for line in said[2:]] == ["5000", "20000"]
    sizes = json.loads(out.read_text())["sizes"]
    assert [size["capacity_tokens"] for size in sizes] == [5000, 20000]
    assert set(sizes[0]["gap_closed"]) == {"lru", "learned", "arc"}
    for wrong in (
        ["--store", "clock"],
        ["--store", "lru", "--store-tokens", "many"],
        ["--store", "lru", "--store-page", "0"],
    ):
        assert main(["replay", str(TRACES / "chat.jsonl"), *wrong]) == 1
        assert "keepwarm replay:" in capsys.readouterr().err
