"""``./bench`` in a checkout where nothing was set up yet."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.__main__ import benchmarks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", [[], ["enigne"], ["--help"]])
def test_names_are_listed_before_anything_is_set_up(words: list[str], tmp_path: Path) -> None:
    for name in ("bench", "scripts/environment.sh", "tests/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "tests/bench", tmp_path / "tests/bench")
    done = subprocess.run(
        [tmp_path / "bench", *words], capture_output=True, text=True, check=False, timeout=120,
        env={"PATH": "/usr/bin:/bin", "KEEPWARM_PYTHON": sys.executable, "PIP_NO_INDEX": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith(f"benchmarks: {', '.join(benchmarks())}\n")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("name", benchmarks())
def test_what_is_listed_can_be_run(name: str) -> None:
    assert callable(importlib.import_module(f"tests.bench.{name}").main)
