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

In all of them equal ids at equal depth mean equal content, *open* traces have arrival times, by which they are put in
order, and in *closed* ones, whose times are not looked at, a session's next request comes ``think`` seconds after the
end of its former one.
"""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
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
    number, first = next(lines, (None, None))
    if number is None:
        raise TraceError(str(path), None, "it is empty")
    if not isinstance(first, dict):
        raise TraceError(str(path), number, "a trace starts with an object: a header or a Mooncake request")
    if "format" not in first and "hash_ids" not in first:
        raise TraceError(
            str(path), number, f"neither a header ('format': {_KNOWN}) nor a Mooncake request ('hash_ids')"
        )
    known = _FORMATS.get(str(first.get("format", "mooncake")))
    if known is None:
        raise TraceError(str(path), number, f"unknown format {reprlib.repr(first['format'])}; known are {_KNOWN}")
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
            while line := file.readline(LINE_LIMIT_BYTES + 1):
                number += 1
                if len(line) > LINE_LIMIT_BYTES:
                    raise TraceError(str(path), number, f"longer than {LINE_LIMIT_BYTES >> 20} MiB")
                if line.strip():
                    yield number, json.loads(line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(str(path), number + 1, f"the gzip file is cut off or damaged: {error}") from error
    except OSError as error:
        raise TraceError(str(path), number + 1 if number else None, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(str(path), number, f"each line must be JSON of its own; {_why_no_json(error)}") from error


def _why_no_json(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"at character {error.pos + 1:,}: {error.msg}"
        case UnicodeDecodeError():
            return f"this is no text in UTF-8 at byte {error.start + 1:,}"
        case RecursionError():
            return "this is nested too deeply"
    return str(error)


def _header(path: Path, number: int, name: str, first: dict[str, object]) -> TraceHeader:
    block, closed = first.get("block"), first.get("closed")
    if type(block) is not int or not 1 <= block <= 65_536:
        raise TraceError(str(path), number, f"block must be 1 to 65536 tokens, not {reprlib.repr(block)}")
    if type(closed) is not bool:
        raise TraceError(str(path), number, f"closed must be true or false, not {reprlib.repr(closed)}")
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
    at_s = _number(value.get("timestamp"), "timestamp", _TIME_LIMIT_S * 1000) / 1000
    prompt = _whole(value.get("input_length"), "input_length", least=1)
    output = _whole(value.get("output_length"), "output_length")
    return _row(line, -1, 0, at_s, 0, prompt, output, 0, _ids(value.get("hash_ids"), "hash_ids"))


def _parse_own(line: int, value: object) -> TraceRow:
    if not isinstance(value, dict):
        raise _BadRow("a request is an object")
    if "format" in value:
        raise _BadRow("a second header: a file holds one trace")
    unknown = sorted(set(value) - {"session", "context", "t", "think", "in", "out", "keep", "blocks"})
    if unknown:
        raise _BadRow(f"unknown member {reprlib.repr(unknown[0])}")
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
    row = TraceRow(
        line=line,
        session=_whole(session, "session", least=-1),
        context=_whole(context, "context"),
        at_s=_number(at_s, "t", _TIME_LIMIT_S),
        think_s=_number(think_s, "think", _TIME_LIMIT_S),
        prompt_tokens=_whole(prompt, "in", least=1),
        output_tokens=max(_whole(output, "out"), 1),  # an answer of no token still has an end
        keep=_whole(keep, "keep"),
        blocks=blocks,
    )
    if row.keep and row.session < 0:
        raise _BadRow("keep is of a session's former request, and this one names no session")
    return row


def _ids(value: object, what: str) -> list[int]:
    if not isinstance(value, list):
        raise _BadRow(f"{what} must be a list of block ids")
    return [_whole(block, "a block id", top=_BLOCK_LIMIT) for block in value]


def _whole(value: object, what: str, *, least: int = 0, top: int = 1 << 40) -> int:
    if value is None:
        raise _BadRow(f"{what} is missing")
    if type(value) is not int or not least <= value < top:
        raise _BadRow(f"{what} must be a whole number of {least:,} to {top - 1:,}, not {reprlib.repr(value)}")
    return value


def _number(value: object, what: str, top: float) -> float:
    if value is None:
        raise _BadRow(f"{what} is missing")
    if type(value) not in (int, float) or not 0 <= value < top:  # type: ignore[operator]
        raise _BadRow(f"{what} must be a number of at least 0 and below {top:,.0f}, not {reprlib.repr(value)}")
    return float(value)  # type: ignore[arg-type]


_TIME_LIMIT_S = 1e12
_RUN_LIMIT = 1 << 22
_FORMATS: dict[str, tuple[str, Callable[[int, object], TraceRow]]] = {
    "rst1": ("rst1", _parse_rst1),
    "mooncake": ("mooncake", _parse_mooncake),
    "keepwarm-requests-1": ("keepwarm-requests-1", _parse_own),
}
_KNOWN = ", ".join(_FORMATS)
