"""Clients that leave at random points leave nothing behind; ``tests.e2e.aborts`` does it ten thousand times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.aborts import passed, storm


@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_that_leave_leave_nothing(seed: int, tmp_path: Path) -> None:
    found = await storm(tmp_path, 250, seed)
    assert passed(found), found
    assert {"ok", "aborted"} <= found["outcomes"].keys()  # on a slow machine few get as far as to be cut
    assert {"1", "2"} <= found["attempts"].keys()
