"""A gateway that is killed while it writes the index's snapshot leaves a whole one: the old or the new."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from radix_index.snapshot import Snapshot

ROOT = Path(__file__).parents[2]


def test_killed_at_every_step_of_writing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.samples.snapshot_writer", str(tmp_path)], cwd=ROOT, check=True)
    found = []
    for folder in sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name)):
        snapshot = Snapshot((folder / "index.snapshot").read_bytes())
        (state,) = snapshot.header.sources
        found.append((state.next_sequence, sum(len(part) for part in snapshot.parts())))
    assert found == sorted(found)  # the old one up to the step that puts the new one there
    (first, entries), (second, twice) = sorted(set(found))
    assert (first, second) == (1, 2)
    assert twice == 2 * entries > 0
    assert len(found) > 12
