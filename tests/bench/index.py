"""``./bench index [--json FILE]``: the prefix index beside its oracle and, where there is one, Dynamo's tree.

* ``apply_blocks_per_s``: wire bytes (SGLang's current format, coalesced chains of 64 blocks of 16 tokens, one chain
  a frame) through decoder, chained hashing and fold into an empty index, by seconds of one core. Also by block size.
* ``match_us``: 512 blocks, 64 instances that hold prefixes of 8, 16, … 512 of them. Also where all hold all
  (``shared``) and where every block has its own set of holders and tiers (``ragged``).
* ``match_2000_ms``: the same with 2,000 blocks, with picking the longest run, P50 and P99 over single calls.
* ``bytes_per_block``: growth of the resident set of a fresh process that is told 10 million blocks (aliases included)
  in chains of 64 spread over 64 instances; ``bytes_per_extra_holder``: and then a second holder for each.
* ``decision_ms`` at 8k tokens that add 500, ``decision_ms_5k`` and ``decision_ms_100k`` that add 300, ``body_ms_…`` and
  ``decision_parts_ms``: an agent's next step from its bytes to the chosen instance (``tests/bench/_decision.py``).
* ``soak``: resident set after the first half and at the end of many unique prompts under a small budget.

``peers``: ``naive`` is the oracle in dictionaries. ``dynamo`` is ``RadixTree`` of ``ai-dynamo-runtime``, run in the
interpreter that ``KEEPWARM_DYNAMO_PYTHON`` names; its ``find_matches`` takes and returns its own types, ``scores_us``
is with its result read into Python. Ours is timed with hashes as they come from ``routing_hash_array`` (``match_us``),
from a list (``match_list_us``) and with every ``InstanceMatch`` made (``match_all_us``). Times are the best of many
short runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from engine_adapter import unpack
from engine_adapter.wire_events import decode_batch
from kvstore.event_wire import encode_sglang
from kvstore.events import BlocksStored, EventBatch
from kvstore.page import Tier
from radix_index import kernels
from radix_index.base import HashArray, PrefixIndex
from radix_index.index import RadixIndex
from radix_index.naive import NaiveIndex
from radix_index.source import SourceFold
from tests.bench._decision import measure_decisions

INSTANCES, MATCH_BLOCKS, CHAIN = 64, 512, 64
DYNAMO_VARIABLE = "KEEPWARM_DYNAMO_PYTHON"
VOCABULARY = 150_000
SHAPES = ("prefixes", "shared", "ragged")


def best_us(call: Callable[[], object], runs: int = 60, calls: int = 50) -> float:
    """Return the time of one call: the best mean of ``calls`` in a row."""
    best = float("inf")
    for _ in range(runs):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - started)
    return best / calls * 1e6


# --- apply ---


def frames(block_size: int, count: int) -> list[bytes]:
    """Return payloads of one coalesced chain each, with token ids at random."""
    chance = np.random.default_rng(block_size)
    payloads = []
    for number in range(count):
        tokens = chance.integers(0, VOCABULARY, CHAIN * block_size).tolist()
        names = chance.integers(-(2**63), 2**63, CHAIN).tolist()
        event = BlocksStored(names, None, tokens, block_size, Tier.DEVICE)
        payloads.append(encode_sglang(EventBatch(number, 1.0, (event,))))
    return payloads


def apply_rate(make: Callable[[], PrefixIndex], block_size: int, count: int, runs: int) -> dict[str, float]:
    """Return blocks from wire bytes a second of one core's time: the best and the median run."""
    payloads, rates = frames(block_size, count), []
    for _ in range(runs):
        fold = SourceFold(make(), "a", model="m", block_size=block_size)
        gc.collect()
        started = time.thread_time()
        for number, payload in enumerate(payloads):
            fold.apply(decode_batch(number, payload))
        rates.append(count * CHAIN / (time.thread_time() - started))
        assert fold.index.stats().blocks > 0.98 * count * CHAIN  # single tokens may repeat
    return {"best": max(rates), "median": float(np.median(rates))}


# --- match ---


def prompt(blocks: int) -> HashArray:
    """Return the hashes of a prompt."""
    return np.random.default_rng(blocks).integers(1, 2**63, blocks, dtype=np.uint64)


def fill(index: PrefixIndex, hashes: HashArray, shape: str) -> None:
    """Tell the index who has what of the prompt."""
    chance = random.Random(shape)
    for number in range(INSTANCES):
        name = f"i{number}"
        index.add_instance(name, block_size=16)
        length = len(hashes) * (number + 1) // INSTANCES if shape == "prefixes" else len(hashes)
        step = 1 if shape == "ragged" else CHAIN
        for start in range(0, length, step):
            tier = Tier(chance.randrange(3)) if shape == "ragged" else Tier.DEVICE
            index.stored(name, tier, hashes[start : min(start + step, length)])


def match_times(make: Callable[[], PrefixIndex], shapes: Iterable[str], runs: int) -> dict[str, dict[str, float]]:
    """Return the µs of a match by shape and form."""
    times = {}
    for shape in shapes:
        index, hashes = make(), prompt(MATCH_BLOCKS)
        fill(index, hashes, shape)
        listed = hashes.tolist()
        times[shape] = {
            "match_us": best_us(lambda: index.match(hashes), runs),  # noqa: B023 - called within the loop
            "match_list_us": best_us(lambda: index.match(listed), runs),  # noqa: B023
            "match_all_us": best_us(lambda: dict(index.match(hashes)), runs),  # noqa: B023
        }
    return times


def long_match_ms(shape: str, calls: int) -> dict[str, float]:
    """Return P50 and P99 of matching 2,000 blocks at 64 instances and picking the longest run."""
    index, hashes = RadixIndex(), prompt(2000)
    fill(index, hashes, shape)
    names = list(index.instances())
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        counts = index.match(hashes).counts
        picked = names[int(counts[:, :4].sum(axis=1).argmax())]
        times.append((time.perf_counter() - started) * 1e3)
    assert picked in names
    return {"p50": float(np.quantile(times, 0.5)), "p99": float(np.quantile(times, 0.99))}


DYNAMO = r"""
import json, sys, time
from importlib.metadata import version
from dynamo._core import RadixTree
asked = json.load(sys.stdin)
def best_us(call, runs, calls=50):
    best = float("inf")
    for _ in range(runs):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - started)
    return best / calls * 1e6
answer = {"version": version("ai-dynamo-runtime")}
for shape in ("prefixes", "shared"):
    tree, hashes = RadixTree(), asked["hashes"]
    for worker in range(asked["instances"]):
        length = len(hashes) * (worker + 1) // asked["instances"] if shape == "prefixes" else len(hashes)
        for start in range(0, length, asked["chain"]):
            part = range(start, min(start + asked["chain"], length))
            stored = {"parent_hash": hashes[start - 1] if start else None,
                      "blocks": [{"block_hash": hashes[i], "tokens_hash": hashes[i]} for i in part]}
            event = {"event_id": start + 1, "data": {"stored": stored}, "dp_rank": 0}
            tree.apply_event(worker, json.dumps(event).encode())
    assert len(tree.find_matches(hashes).scores) == asked["instances"]
    answer[shape] = {"match_us": best_us(lambda: tree.find_matches(hashes), asked["runs"]),
                     "scores_us": best_us(lambda: tree.find_matches(hashes).scores, asked["runs"])}
print(json.dumps(answer))
"""


def dynamo(runs: int) -> dict[str, object] | None:
    """Return Dynamo's times and version, ``None`` if no interpreter that has it is named."""
    interpreter = os.environ.get(DYNAMO_VARIABLE)
    if not interpreter:
        return None
    asked = {"hashes": prompt(MATCH_BLOCKS).tolist(), "instances": INSTANCES, "chain": CHAIN, "runs": runs}
    done = subprocess.run(
        [interpreter, "-c", DYNAMO], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


# --- memory ---


def resident_bytes() -> int:
    """Return the resident set of this process."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_memory(kind: str, blocks: int, answer: multiprocessing.SimpleQueue[dict[str, float]]) -> None:
    """Fill an index and report bytes of resident set a block. Runs in a process of its own."""
    index: PrefixIndex = RadixIndex(byte_budget=8 * 2**30) if kind == "ours" else NaiveIndex()
    for number in range(INSTANCES):
        index.add_instance(f"i{number}", block_size=16)
    tell(index, min(blocks, 64 * CHAIN), 0, 0)  # whatever is allocated once
    empty = resident_bytes()
    tell(index, blocks, 1, 0)
    filled = resident_bytes()
    tell(index, blocks, 1, 1)
    shared = resident_bytes()
    answer.put(
        {
            "bytes_per_block": (filled - empty) / blocks,
            "bytes_per_extra_holder": (shared - filled) / blocks,
            "holder_sets": index.stats().holder_sets,
            "budgeted_bytes_per_block": index.stats().used_bytes / blocks,
        }
    )


def tell(index: PrefixIndex, blocks: int, seed: int, shift: int) -> None:
    """Announce chains, each by one instance, ``shift`` instances further on than the seed says."""
    chance = np.random.default_rng(seed)
    for number in range(blocks // CHAIN):
        pairs = chance.integers(1, 2**63, (2, CHAIN), dtype=np.uint64)
        index.stored(f"i{(number + shift) % INSTANCES}", Tier.DEVICE, pairs[0], pairs[1])


def measure_soak(prompts: int, answer: multiprocessing.SimpleQueue[dict[str, float]]) -> None:
    """Announce and match unique prompts under a small budget; report the resident set half-way and at the end."""
    index, chance = RadixIndex(byte_budget=32 * 2**20), np.random.default_rng(5)
    for number in range(INSTANCES):
        index.add_instance(f"i{number}", block_size=16)
    half = 0
    for number in range(prompts):
        if number == prompts // 2:
            half = resident_bytes()
        hashes = chance.integers(1, 2**63, (2, 32), dtype=np.uint64)
        index.match(hashes[0])
        index.release(index.reserve(f"i{number % INSTANCES}", hashes[0]))
        index.stored(f"i{number % INSTANCES}", Tier.DEVICE, hashes[0], hashes[1])
    stats = index.stats()
    answer.put(
        {
            "prompts": prompts,
            "half_bytes": half,
            "end_bytes": resident_bytes(),
            "used_bytes": stats.used_bytes,
            "byte_budget": stats.byte_budget,
            "blocks": stats.blocks,
        }
    )


def alone(target: Callable[..., None], *arguments: object) -> dict[str, float]:
    """Run a measurement in a fresh process."""
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=target, args=(*arguments, answer))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{target.__name__} failed")
    result: dict[str, float] = answer.get()
    return result


# --- all of it ---


def uncompiled() -> RadixIndex:
    """Return an index as it is where no C compiler was at hand."""
    return RadixIndex(compiled=False)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run everything and return the result."""
    runs, quick = options.runs, options.quick
    ours = match_times(RadixIndex, SHAPES, runs)
    naive = match_times(NaiveIndex, ("prefixes",), max(1, runs // 20))["prefixes"]
    apply = {size: apply_rate(RadixIndex, size, 300, 3 if quick else 40) for size in (1, 16, 64)}
    naive_apply = apply_rate(NaiveIndex, 16, 200, 2)
    plain = match_times(uncompiled, ("prefixes",), runs)["prefixes"]
    plain["apply_blocks_per_s"] = apply_rate(uncompiled, 16, 300, 3)["best"]
    blocks = 200_000 if quick else options.blocks
    memory, naive_memory = alone(measure_memory, "ours", blocks), alone(measure_memory, "naive", 200_000)
    peers: dict[str, object] = {
        "naive": naive | {"apply_blocks_per_s": naive_apply["best"], "bytes_per_block": naive_memory["bytes_per_block"]}
    }
    theirs = dynamo(runs)
    if theirs is not None:
        prefixes, shared = theirs["prefixes"], theirs["shared"]
        assert isinstance(prefixes, dict)
        peers["dynamo"] = prefixes | {"shared": shared, "version": theirs["version"]}
    return {
        **memory,
        "blocks": blocks,
        "apply_blocks_per_s": apply[16]["best"],
        "apply_by_block_size": apply,
        **ours["prefixes"],
        "match_by_shape": ours,
        "match_2000_ms": {shape: long_match_ms(shape, 200 if quick else 3000) for shape in SHAPES},
        **measure_decisions(2 if quick else options.agents),
        "without_compiled_index": plain,
        "soak": alone(measure_soak, 5000 if quick else options.soak_prompts),
        "peers": peers,
        "ratios": {name: peer["match_us"] / ours["prefixes"]["match_us"] for name, peer in peers.items()},  # type: ignore[index]
        "compiled": {"index": kernels.COMPILED is not None, "wire": unpack.COMPILED},
        "versions": {"python": platform.python_version(), "numpy": version("numpy"), "xxhash": version("xxhash")},
    }


def report(result: dict[str, object]) -> str:
    """Return the result for a reader."""
    lines = [f"{key:26} {json.dumps(value)}" for key, value in result.items()]
    if "dynamo" not in result["peers"]:  # type: ignore[operator]
        lines.append(f"(Dynamo's tree: install ai-dynamo-runtime anywhere and name its python in {DYNAMO_VARIABLE})")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 when it could be run."""
    parser = argparse.ArgumentParser(
        prog="bench index", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="blocks for the memory figures")
    parser.add_argument("--soak-prompts", type=int, default=200_000, help="unique prompts of the soak")
    parser.add_argument("--agents", type=int, default=25, help="agents in each case of the decisions, of 8 steps")
    parser.add_argument("--runs", type=int, default=100, help="short runs of which the best counts")
    parser.add_argument("--quick", action="store_true", help="small numbers: shows that it works, measures little")
    options = parser.parse_args(argv)
    result = measure(options)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
