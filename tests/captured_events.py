"""Reads the recorded KV event frames in ``tests/captures``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

CAPTURES = Path(__file__).parent / "captures"
SGLANG = (
    "sglang_kv_events_0.5.23.bin",
    "sglang_kv_events_hicache_0.5.23.bin",
    "sglang_kv_events_page16_0.5.23.bin",
    "sglang_kv_events_page1_0.5.23.bin",
)
VLLM = (
    "vllm-0.32.0-kv-events.msgs",
    "vllm-0.32.0-kv-events-evict.msgs",
    "vllm-0.32.0-kv-events-connector-reset.msgs",
)


def captured_frames(name: str) -> list[tuple[int, bytes]]:
    """Return (sequence, payload) of every recorded frame, in the order of arrival."""
    data = (CAPTURES / name).read_bytes()
    frames = _length_prefixed(data) if name.endswith(".bin") else _msgpack_stream(data)
    return [(int.from_bytes(sequence, "big"), payload) for _, sequence, payload in frames]


def _length_prefixed(data: bytes) -> Iterator[tuple[bytes, ...]]:
    parts, offset = [], 0
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4], "big")
        parts.append(data[offset + 4 : offset + 4 + length])
        offset += 4 + length
    return (tuple(parts[i : i + 3]) for i in range(0, len(parts), 3))


def _msgpack_stream(data: bytes) -> Iterator[tuple[bytes, ...]]:
    """Split the stream: every record is an array of three byte strings, so their headers tell all lengths."""
    offset = 0
    while offset < len(data):
        assert data[offset] == 0x93, "an array of three"
        offset, record = offset + 1, []
        for _ in range(3):
            width = {0xC4: 1, 0xC5: 2, 0xC6: 4}[data[offset]]
            start = offset + 1 + width
            offset = start + int.from_bytes(data[offset + 1 : start], "big")
            record.append(data[start:offset])
        yield tuple(record)


def wire_events(payload: bytes) -> list[dict[str, Any]]:
    """Return a payload's events as they stand on the wire, read by nobody's decoder but msgpack's."""
    return list(msgspec.msgpack.decode(payload)[1])
