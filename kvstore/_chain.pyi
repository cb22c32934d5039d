"""See ``kvstore.block.routing_hash_array``."""

from typing_extensions import Buffer

def chain(data: Buffer, width: int, previous: int) -> bytes: ...
