"""Children are started, restarted, stopped, and do not outlive their parent. The children here are small scripts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_adapter.embedded.launch import EmbeddedProcess, LaunchSpec, free_port
from engine_adapter.errors import LaunchError

_STAYS = "import signal, sys, time; print('up', flush=True); signal.signal(15, lambda *a: sys.exit(0)); signal.pause()"
_DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def _process(folder: Path, script: str, **more: float) -> EmbeddedProcess:
    spec = LaunchSpec("x", free_port(), folder / "logs" / "x.log", (), **more)  # type: ignore[arg-type]
    return EmbeddedProcess(spec, command=(sys.executable, "-c", script))


async def _until_up(process: EmbeddedProcess, starts: int = 1) -> int:
    async with asyncio.timeout(30):
        while process.pid is None or process.spec.log_path.read_text().count("up") < starts:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert process.pid is not None
    return process.pid


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_started_restarted_and_stopped(tmp_path: Path) -> None:
    process = _process(tmp_path, _STAYS)
    running = asyncio.create_task(process.run(lambda: True))
    first = await _until_up(process)
    await process.restart()
    second = await _until_up(process, starts=2)
    assert first != second
    assert not _is_alive(first)
    await process.stop()
    await running
    assert not _is_alive(second)
    assert process.pid is None


async def test_cancelling_its_supervision_stops_it(tmp_path: Path) -> None:
    process = _process(tmp_path, _STAYS)
    running = asyncio.create_task(process.run(lambda: True))
    pid = await _until_up(process)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not _is_alive(pid)


async def test_one_that_does_not_listen_is_killed_at_the_limit(tmp_path: Path) -> None:
    process = _process(tmp_path, _DEAF, stop_limit_s=0.05)
    running = asyncio.create_task(process.run(lambda: True))
    pid = await _until_up(process)
    await process.stop()
    await running
    assert not _is_alive(pid)


async def test_one_that_never_came_up_ends_the_start_with_its_log(tmp_path: Path) -> None:
    process = _process(tmp_path, "print('no such model'); raise SystemExit(3)")
    with pytest.raises(LaunchError, match=r"(?s)ended with 3.*no such model"):
        await process.run(lambda: False)


async def test_one_that_dies_later_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_adapter.embedded.launch._FIRST_PAUSE_S", 0.01)
    process = _process(tmp_path, _STAYS)
    running = asyncio.create_task(process.run(lambda: True))
    os.kill(await _until_up(process), signal.SIGKILL)
    assert _is_alive(await _until_up(process, starts=2))
    await process.stop()
    await running


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG, which Linux has")
def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    child = "import os, signal; from engine_adapter.embedded.guarded import die_with; die_with(int(os.environ['P'])); "
    child += "print(os.getpid(), flush=True); signal.pause()"
    parent = "import os, subprocess, sys; os.environ['P'] = str(os.getpid()); "
    parent += f"subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert _is_alive(pid)
        process.kill()
        assert process.stdout.read() == b""  # the pipe ends when the last holder, the child, is gone
    deadline = time.monotonic() + 10  # its files are closed a moment before it is gone
    while _is_running(pid) and time.monotonic() < deadline:
        pass
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
