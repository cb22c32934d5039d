"""Run the embedded engine so that it dies with the process that started it, however that one dies.

``python -m engine_adapter.embedded.guarded PARENT_PID ARGUMENT…`` asks the kernel (Linux) for a SIGTERM at the parent's
death and then is ``python -m engine_adapter.embedded ARGUMENT…``. Elsewhere the parent's own orderly end has to do.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Make this process end when its parent does; ends at once if that has happened already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit("the process that started this engine is gone")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    del sys.argv[1]
    runpy.run_module("engine_adapter.embedded", run_name="__main__", alter_sys=True)
