"""Whether LMDB can read an index, found out by a process of its own.

LMDB trusts the pages that it maps. What a damaged one does to whoever reads it, or writes beside it, is left to chance:
an error, an assertion that ends the process, a look at memory that is not there. Power losses leave such pages (a group
of writes of which some arrived), and an engine must not die of its cache. So another process reads all of an index
first, which takes some 30 ms and what reading takes; whatever becomes of that one, nobody minds.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import lmdb

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
_DAMAGED = 3
_READ_ALL = f"""
import os, sys
sys.path.append(sys.argv[1])
import lmdb
try:
    with lmdb.open(sys.argv[2], map_size=int(sys.argv[3]), lock=False, sync=False, metasync=False) as env:
        keys = []
        with env.begin() as txn:
            cursor = txn.cursor()
            for _ in cursor:
                pass
            keys += [cursor.key() for there in (cursor.first, cursor.last) if there()]
        with open(os.devnull, "wb") as nowhere:
            env.copyfd(nowhere.fileno(), compact=True)  # walks the list of free pages, too
        txn = env.begin(write=True)
        for key in keys:
            txn.delete(key)
        txn.put(b"0" * 16, b"0" * 512)
        txn.abort()
except lmdb.Error as error:
    if (getattr(error, "code", None) or 0) <= 0:  # not what the system said
        sys.exit({_DAMAGED})
"""


def is_readable(path: Path, map_bytes: int) -> bool:
    """Tell whether an index that nobody has open can be read and written to. It is left as it is.

    Only damage counts: what the system refuses, or takes longer than a minute for, is for its user to find out. Blocks.
    """
    packages = str(Path(lmdb.__file__).parent.parent)
    command = [sys.executable, "-I", "-S", "-c", _READ_ALL, packages, str(path), str(map_bytes)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("the index %s could not be read through before it is used: %s", path, error)
        return True
    return done.returncode >= 0 and done.returncode != _DAMAGED
