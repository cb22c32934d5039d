"""Writes snapshots of a growing index and dies at a step of the second one: ``python -m … HOME``.

For each step, in a child of its own and a folder ``HOME/step``, until a child finds no such step and lives.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from gateway import snapshots
from gateway.snapshots import IndexSnapshots, SnapshotOptions
from kvstore.page import Tier
from radix_index.index import RadixIndex
from radix_index.snapshot import SourceState

WRITE_BYTES = 1 << 14
ROWS = 3 * WRITE_BYTES // 18  # several writes
BATCH = 100


class Steps:
    """Counts what is done to the file system; at the last step the process is no more."""

    def __init__(self) -> None:
        self.left: int | None = None

    def step(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Feed:
    """A source that has published so many batches."""

    resets, pool, is_settling = 0, None, False

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def state(self) -> SourceState:
        return SourceState("a", "tcp://x", "m", 16, None, self.batches, ((self.batches - 1, 1.0),), "complete")


def only(feed: object) -> Callable[[], list[Any]]:
    """Return what lists one feed."""
    return lambda: [feed]


class SlowFile:
    """A file whose every write is a step, taken half way and at its end."""

    def __init__(self, file: BinaryIO, steps: Steps) -> None:
        self._file, self._steps = file, steps

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._steps.step()
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._steps.step()
        return len(data) // 2 + self._file.write(data[len(data) // 2 :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def instrument(steps: Steps) -> None:
    create, fsync, replace = snapshots._create, os.fsync, Path.replace

    def stepping(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            steps.step()
            result = function(*arguments)
            steps.step()
            return result

        return call

    def slow(path: Path) -> BinaryIO:
        return cast(BinaryIO, SlowFile(stepping(create)(path), steps))

    snapshots._create = slow
    os.fsync = stepping(fsync)
    Path.replace = stepping(replace)  # type: ignore[method-assign]


async def write(home: Path, step: int) -> None:
    index, steps = RadixIndex(), Steps()
    snapshots._WRITE_BYTES = WRITE_BYTES
    instrument(steps)
    index.add_instance("a", block_size=16)
    writer = IndexSnapshots(home / "index.snapshot", index, time.time, SnapshotOptions(rows_at_once=256))
    for batches in (1, 2):
        for start in range(1, ROWS, BATCH):
            hashes = [batches << 40 | number for number in range(start, start + BATCH)]
            index.stored("a", Tier.DEVICE, hashes, hashes)
        steps.left = step if batches == 2 else None
        assert await writer.save(only(Feed(batches)))


def main(home: Path) -> None:
    step, status = 0, -1
    while status:
        folder = home / str(step)
        folder.mkdir()
        child = os.fork()
        if not child:
            asyncio.run(write(folder, step))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL)
        step += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
