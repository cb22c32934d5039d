"""Run a module so that it dies with the process that started it, however that one dies.

``python -m engine_adapter.embedded.guarded PARENT_PID MODULE ARGUMENT…`` asks the kernel (Linux) for a SIGTERM at the
parent's death and then is ``python -m MODULE ARGUMENT…``. Elsewhere the parent's own orderly end has to do.
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
        raise SystemExit("the process that started this one is gone")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
