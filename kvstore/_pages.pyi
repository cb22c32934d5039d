"""See ``kvstore.memory.copy_and_hash`` and ``kvstore.tiers.page_io``."""

from collections.abc import Sequence

class Queue: ...  # an opaque capsule

def copy(
    targets: Sequence[memoryview | bytearray], sources: Sequence[memoryview | bytes | bytearray], /
) -> list[int]: ...
def queue(depth: int, /) -> Queue: ...
def transfer(
    queue: Queue,
    fd: int,
    direct_fd: int,
    write: bool,
    buffers: Sequence[memoryview],
    firsts: Sequence[int],
    offsets: Sequence[int],
    depth: int,
    deadline_ns: int,
    dock: memoryview | None,
    /,
) -> tuple[list[int], list[int]]: ...
