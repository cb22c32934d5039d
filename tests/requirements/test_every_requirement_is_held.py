"""Every requirement that the front can break has tests, and they are there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.requirements.covered import COVERED, ELSEWHERE

ROOT = Path(__file__).parents[2]


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of a file's test functions."""
    tree = ast.parse((ROOT / path).read_text())
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


def test_none_is_left_out() -> None:
    assert {*COVERED, *ELSEWHERE} == {f"R{number:02}" for number in range(1, 26)}
    assert not ELSEWHERE & COVERED.keys()


@pytest.mark.parametrize("requirement", sorted(COVERED))
def test_its_tests_are_there(requirement: str) -> None:
    assert COVERED[requirement]
    for name in COVERED[requirement]:
        path, _, test = name.partition("::")
        assert test in names_in(path), name
