"""Small made-up traffic on which a routing policy may fail that does well on recorded traces.

    python -m tests.bench.routing_workloads FOLDER [--seed N] [NAME …]

writes one trace each (``NAME.rst.gz``, the format that ``keepwarm replay`` reads too):

* ``decode_bound``: chats with short prompts and long answers, arriving just under what the decoding of the device's
  memory can take;
* ``low_load``: few runs that share one system prompt, far from any limit;
* ``bursts``: now and then sixty-four requests at once on one prefix that nobody holds yet;
* ``tenants``: three hundred tenants with a prompt each behind one system prompt that all share;
* ``mixed_lengths``: prompts from two hundred tokens to a hundred thousand, answers from ten to two thousand.

``RECOMMENDED`` says with how many instances each is meant to be run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = 64
RECOMMENDED = {"decode_bound": 8, "low_load": 4, "bursts": 8, "tenants": 8, "mixed_lengths": 8}
"""Instances of an 8-billion-parameter model on an H100."""

Row = tuple[int, int, float, float, int, int, int, list[int]]


@dataclass(slots=True)
class Names:
    """Hands out block ids that nobody had before."""

    next_id: int = 1

    def take(self, tokens: int) -> list[int]:
        """Return ids for so many tokens, the last block counted as full."""
        count = max(1, -(-tokens // BLOCK))
        first, self.next_id = self.next_id, self.next_id + count
        return list(range(first, first + count))


@dataclass(slots=True)
class Chat:
    """One conversation, growing by questions and answers."""

    blocks: list[int] = field(default_factory=list)
    turn: int = 0


def _row(at_s: float, blocks: Sequence[int], output: int) -> Row:
    runs: list[int] = []
    for block in blocks:
        if runs and runs[-2] + runs[-1] == block:
            runs[-1] += 1
        else:
            runs += [block, 1]
    return -1, 0, round(at_s, 3), 0.0, len(blocks) * BLOCK, max(output, 1), 0, runs


def _between(chance: random.Random, low: float, high: float) -> int:
    return int(chance.uniform(low, high))


def _chats(
    chance: random.Random, names: Names, heads: Sequence[Sequence[int]], *, rate: float, span_s: float,
    turns: int, question: tuple[int, int], answer: tuple[int, int], pause_s: float,
) -> Iterator[Row]:  # fmt: skip
    """Yield conversations that begin at random and go on whatever their answers take."""
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < span_s:
        chat, when_s = Chat(list(chance.choice(heads))), at_s
        for _ in range(_between(chance, 1, 2 * turns)):
            output = _between(chance, *answer)
            chat.blocks += names.take(_between(chance, *question))
            yield _row(when_s, chat.blocks, output)
            chat.blocks += names.take(output)
            when_s += chance.expovariate(1 / pause_s) + output * 0.03


def decode_bound(chance: random.Random) -> Iterator[Row]:
    """Long answers to short prompts, near saturation."""
    names = Names()
    heads = [names.take(512) for _ in range(40)]
    return _chats(
        chance, names, heads, rate=8.3, span_s=300, turns=3, question=(200, 1500), answer=(400, 1800), pause_s=20
    )


def low_load(chance: random.Random) -> Iterator[Row]:
    """Hardly anything to do, and one system prompt for all."""
    names = Names()
    heads = [names.take(3072)]
    return _chats(
        chance, names, heads, rate=0.15, span_s=1800, turns=8, question=(50, 600), answer=(50, 700), pause_s=8
    )


def bursts(chance: random.Random) -> Iterator[Row]:
    """A steady trickle, and bursts on prefixes that are new."""
    names = Names()
    yield from _chats(
        chance, names, [names.take(1024) for _ in range(20)],
        rate=1.5, span_s=900, turns=2, question=(500, 4000), answer=(50, 500), pause_s=20,
    )  # fmt: skip
    for number in range(30):
        head, at_s = names.take(_between(chance, 4_000, 24_000)), 20 + 30.0 * number
        for _ in range(64):
            yield _row(
                at_s + chance.uniform(0, 0.5), head + names.take(_between(chance, 64, 800)), _between(chance, 20, 300)
            )


def tenants(chance: random.Random) -> Iterator[Row]:
    """Many tenants, each with a prompt of its own behind the common one."""
    names = Names()
    common = names.take(2048)
    heads = [common + names.take(_between(chance, 500, 6000)) for _ in range(300)]
    heads = [head for place, head in enumerate(heads) for _ in range(1 + 300 // (place + 3))]  # a few ask often
    return _chats(
        chance, names, heads, rate=7.0, span_s=500, turns=2, question=(100, 1500), answer=(50, 500), pause_s=15
    )


def mixed_lengths(chance: random.Random) -> Iterator[Row]:
    """Everything from a word to a book."""
    names = Names()
    heads = [names.take(1024) for _ in range(10)]
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(4.0)) < 800:
        prompt = min(int(200 * 2 ** (chance.expovariate(0.33))), 100_000)
        output = min(int(10 * 2 ** (chance.expovariate(0.25))), 2_000)
        document = list(chance.choice(heads)) + names.take(prompt)
        yield _row(at_s, document, output)
        if chance.random() < 0.4:
            for turn in range(_between(chance, 1, 4)):
                question = names.take(_between(chance, 50, 500))
                yield _row(at_s + 20 * (turn + 1) + chance.expovariate(0.1), document + question, output)


WORKLOADS: dict[str, Callable[[random.Random], Iterator[Row]]] = {
    make.__name__: make for make in (decode_bound, low_load, bursts, tenants, mixed_lengths)
}


def write(folder: Path, name: str, seed: int) -> Path:
    """Write one trace; the same seed gives the same bytes."""
    rows = sorted(WORKLOADS[name](random.Random(seed)), key=lambda row: row[2])
    head = {
        "format": "rst1", "name": name, "block": BLOCK, "closed": False, "source": "made up", "license": "Apache-2.0",
        "notes": f"seed {seed}", "rows": len(rows),
    }  # fmt: skip
    path = folder / f"{name}.rst.gz"
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        for line in (head, *rows):
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Write traces."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.routing_workloads", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - WORKLOADS.keys():
        parser.error(f"there is no workload {min(unknown)!r}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or WORKLOADS:
        print(write(arguments.folder, name, arguments.seed), RECOMMENDED[name], "instances")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
