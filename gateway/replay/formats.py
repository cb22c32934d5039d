"""Public request traces, read line by line. Plain or gzipped; the format is told by the first line.

``rst1``
    A header object with ``format``, ``name``, ``block`` (tokens a block) and ``closed``, then arrays
    ``[session, context, t, think, in, out, keep, runs]``. ``keep``: leading blocks equal to the former row of the same
    session and context; ``runs``: the other block ids, flat ``[start, count, …]``. Session -1: unknown.

``mooncake``
    No header; objects with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` of 512 tokens each,
    the last one partial (github.com/kvcache-ai/Mooncake, FAST25-release).

``keepwarm-requests-1``
    Our own, easy to write from any log. A header object ``{"format": "keepwarm-requests-1", "name", "block",
    "closed"}``, then objects with ``in`` and ``out`` (tokens) and ``blocks`` (ids, from the prompt's start),
    and optionally ``t`` (s), ``session`` and ``context`` (integers), ``think`` (s) and ``keep`` as in rst1.

In all of them equal ids at equal depth mean equal content, *open* traces have arrival times, and in *closed* ones a
session's next request comes ``think`` seconds after the end of its former one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.replay.errors import TraceError

MOONCAKE_BLOCK_TOKENS = 512
LINE_LIMIT_BYTES = 16 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What holds for all rows. ``closed``: requests wait for the former answer of their session."""

    format: str
    name: str
    block_tokens: int
    closed: bool


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. Its blocks are the first ``keep`` of the former row of the same context, then ``blocks``."""

    line: int
    session: int
    context: int
    at_s: float
    think_s: float
    prompt_tokens: int
    output_tokens: int
    keep: int
    blocks: list[int]


def read_trace(path: Path) -> tuple[TraceHeader, Iterator[TraceRow]]:
    """Return the header and the rows, read as they are asked for. Raises ``TraceError``, also while iterating."""
    lines = _lines(path)
    number, first = next(lines, (1, None))
    if not isinstance(first, dict):
        raise TraceError(str(path), number, "a trace starts with an object: a header or a Mooncake request")
    known = _FORMATS.get(str(first.get("format", "mooncake" if "hash_ids" in first else "")))
    if known is None:
        raise TraceError(str(path), number, f"unknown format; known are {', '.join(_FORMATS)}")
    name, parse = known
    if name == "mooncake":
        header = TraceHeader(name, path.name.split(".")[0], MOONCAKE_BLOCK_TOKENS, closed=False)
        rows = [(number, first)]
    else:
        header, rows = _header(path, number, name, first), []
    return header, _rows(path, rows, lines, parse)


def _lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield (line number, decoded line); empty lines are skipped."""
    number = 0
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as file:
            while line := file.readline(LINE_LIMIT_BYTES):
                number += 1
                if line.strip():
                    yield number, json.loads(line)
    except OSError as error:
        raise TraceError(str(path), number + 1 if number else None, error.strerror or str(error)) from error
    except (ValueError, EOFError, RecursionError) as error:  # not JSON, not UTF-8, or a gzip file that ends early
        raise TraceError(str(path), max(number, 1), f"not a line of JSON: {error}") from error


def _header(path: Path, number: int, name: str, first: dict[str, object]) -> TraceHeader:
    block, closed = first.get("block"), first.get("closed")
    if type(block) is not int or not 1 <= block <= 65_536:
        raise TraceError(str(path), number, f"block must be 1 to 65536 tokens, not {block!r}")
    if type(closed) is not bool:
        raise TraceError(str(path), number, f"closed must be true or false, not {closed!r}")
    return TraceHeader(name, str(first.get("name", path.name)), block, closed)


def _rows(
    path: Path,
    first: list[tuple[int, dict[str, object]]],
    rest: Iterator[tuple[int, object]],
    parse: Callable[[int, object], TraceRow],
) -> Iterator[TraceRow]:
    for source in (iter(first), rest):
        for number, value in source:
            try:
                yield parse(number, value)
            except _BadRow as error:
                raise TraceError(str(path), number, str(error)) from None


class _BadRow(Exception):
    """What is wrong with a row; the reader adds where."""


def _parse_rst1(line: int, value: object) -> TraceRow:
    if not isinstance(value, list) or len(value) != 8:
        raise _BadRow("a row has 8 items: session, context, t, think, in, out, keep, runs")
    session, context, at_s, think_s, prompt, output, keep, runs = value
    if not isinstance(runs, list) or len(runs) % 2:
        raise _BadRow("runs must be pairs of start and count")
    blocks: list[int] = []
    for start, count in zip(runs[::2], runs[1::2], strict=True):
        low = _whole(start, "the start of a run", top=_BLOCK_LIMIT)
        blocks.extend(range(low, low + _whole(count, "the count of a run", top=_RUN_LIMIT)))
    return _row(line, session, context, at_s, think_s, prompt, output, keep, blocks)


def _parse_mooncake(line: int, value: object) -> TraceRow:
    if not isinstance(value, dict):
        raise _BadRow("a Mooncake request is an object")
    at_s = _seconds(value.get("timestamp"), "timestamp") / 1000
    prompt, output = value.get("input_length"), value.get("output_length")
    return _row(line, -1, 0, at_s, 0, prompt, output, 0, _ids(value.get("hash_ids"), "hash_ids"))


def _parse_own(line: int, value: object) -> TraceRow:
    if not isinstance(value, dict):
        raise _BadRow("a request is an object")
    unknown = sorted(set(value) - {"session", "context", "t", "think", "in", "out", "keep", "blocks"})
    if unknown:
        raise _BadRow(f"unknown member {unknown[0]!r}")
    head = (value.get("session", -1), value.get("context", 0), value.get("t", 0), value.get("think", 0))
    blocks = _ids(value.get("blocks"), "blocks")
    return _row(line, *head, value.get("in"), value.get("out"), value.get("keep", 0), blocks)


def _row(
    line: int,
    session: object,
    context: object,
    at_s: object,
    think_s: object,
    prompt: object,
    output: object,
    keep: object,
    blocks: list[int],
) -> TraceRow:
    return TraceRow(
        line=line,
        session=_whole(session, "session", least=-1),
        context=_whole(context, "context"),
        at_s=_seconds(at_s, "t"),
        think_s=_seconds(think_s, "think"),
        prompt_tokens=_whole(prompt, "the prompt's tokens", least=1),
        output_tokens=max(_whole(output, "the output's tokens"), 1),  # an answer of no token still has an end
        keep=_whole(keep, "keep"),
        blocks=blocks,
    )


def _ids(value: object, what: str) -> list[int]:
    if not isinstance(value, list):
        raise _BadRow(f"{what} must be a list of block ids")
    return [_whole(block, "a block id", top=_BLOCK_LIMIT) for block in value]


def _whole(value: object, what: str, *, least: int = 0, top: int = 1 << 40) -> int:
    if type(value) is not int or not least <= value < top:
        raise _BadRow(f"{what} must be a whole number of at least {least}, not {value!r}")
    return value


def _seconds(value: object, what: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e12:  # type: ignore[operator]
        raise _BadRow(f"{what} must be a number of at least 0, not {value!r}")
    return float(value)  # type: ignore[arg-type]


_RUN_LIMIT = 1 << 22
_FORMATS: dict[str, tuple[str, Callable[[int, object], TraceRow]]] = {
    "rst1": ("rst1", _parse_rst1),
    "mooncake": ("mooncake", _parse_mooncake),
    "keepwarm-requests-1": ("keepwarm-requests-1", _parse_own),
}
