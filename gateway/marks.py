"""What a record keeps of a prompt's blocks: every so many of their hashes, bounded, to tell prefixes apart by."""

from __future__ import annotations

import numpy as np

from gateway.prompts import Prompt
from tracing.messages import MessageChain
from tracing.record import PrefixMarks

STRIDE_TOKENS = 128
"""About how far marks are apart: what is told of a prefix is right to this many tokens."""

MAX_MARKS = 1024
"""Marks of one prompt: 8 KiB, 131,072 tokens at the usual stride."""


def prefix_marks(prompt: Prompt | None, chain: MessageChain) -> PrefixMarks | None:
    """Return the marks of a prompt whose ids are known, by its smallest blocks. Cost: a few microseconds."""
    if prompt is None or not prompt.is_exact or not prompt.hashes:
        return None
    size = min(prompt.hashes)
    every = -(-STRIDE_TOKENS // size)
    chosen = np.asarray(prompt.hashes[size], dtype="<u8")[every - 1 :: every]
    digest = chain[-1].digest.hex() if chain else None
    return PrefixMarks(every * size, chosen[:MAX_MARKS].tobytes(), is_cut=len(chosen) > MAX_MARKS, digest=digest)
