"""A trace as requests over *segments*, so that a prompt of 100,000 tokens is some dozens of items and not thousands.

Every block of the trace gets its routing hash once, chained over block ids as ``kvstore.block`` chains over token ids.
Blocks that always occur together form a segment: it ends where a request ends, where prompts part, or after
``SEGMENT_TOKENS``. A request is a chain of whole segments; simulated caches keep and evict whole segments, much as
SGLang's radix tree evicts whole leaves. The index is fed and asked in single blocks, as in production.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from gateway.replay.errors import TraceError
from gateway.replay.formats import TraceHeader, TraceRow, read_trace
from kvstore.block import routing_seed
from radix_index.base import HashArray

SEGMENT_TOKENS = 2048


@dataclass(slots=True, eq=False)
class TraceRequest:
    """One request. ``path``: its segments; ``next``: the session's next request in a closed trace."""

    number: int
    session: int
    at_s: float
    think_s: float
    prompt_tokens: int
    output_tokens: int
    path: tuple[int, ...] = ()
    next: TraceRequest | None = None
    is_first: bool = True


@dataclass(slots=True)
class Workload:
    """All requests of a trace in order of arrival, and its segments."""

    header: TraceHeader
    requests: list[TraceRequest]
    segment_tokens: list[int]
    segment_end_tokens: list[int]  # tokens from the prompt's start to the segment's end
    segment_hashes: list[HashArray]
    early_lines: tuple[int, ...] = ()  # of an open trace: lines whose request came before that of the line above

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of the blocks that are different."""
        used = {segment for request in self.requests for segment in request.path}
        return sum(self.segment_tokens[segment] for segment in used)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last, of an open trace."""
        return max((request.at_s for request in self.requests), default=0.0)

    def hashes(self, path: Sequence[int]) -> HashArray:
        """Return the routing hashes of a path's blocks. O(blocks)."""
        parts = [self.segment_hashes[segment] for segment in path]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def prefix_tokens(self, path: Sequence[int], segments: int) -> int:
        """Return the tokens of the first segments of a path. O(1)."""
        return self.segment_end_tokens[path[segments - 1]] if segments else 0


def load_workload(path: Path, segment_tokens: int = SEGMENT_TOKENS) -> Workload:
    """Read a trace whole. Raises ``TraceError``. O(new blocks); about 2 s for a million distinct blocks."""
    header, rows = read_trace(path)
    return build_workload(header, rows, str(path), segment_tokens)


def build_workload(
    header: TraceHeader, rows: Iterable[TraceRow], source: str = "trace", segment_tokens: int = SEGMENT_TOKENS
) -> Workload:
    """Make a workload of rows; see ``load_workload``."""
    tree = _BlockTree(header.block_tokens, segment_tokens)
    former: dict[tuple[int, int], list[int]] = {}
    ended: list[tuple[TraceRequest, int]] = []
    early: list[int] = []
    for row in rows:
        if ended and not header.closed and row.at_s < ended[-1][0].at_s:
            early.append(row.line)
        key = (row.session, row.context)
        before = former.get(key, [])
        if row.keep > len(before):
            raise TraceError(source, row.line, f"keeps {row.keep} blocks of a request that had {len(before)}")
        nodes = before[: row.keep] + tree.add(before[row.keep - 1] if row.keep else _ROOT, row.blocks)
        if row.session >= 0:
            former[key] = nodes
        full = min(row.prompt_tokens // header.block_tokens, len(nodes))  # a partial last block has no name
        request = TraceRequest(len(ended), row.session, row.at_s, row.think_s, row.prompt_tokens, row.output_tokens)
        ended.append((request, nodes[full - 1] if full else _ROOT))
        tree.end(nodes, full)
    if not ended:
        raise TraceError(source, None, "there is no request in it")
    return _assemble(header, tree, ended, early)


_ROOT = -1


@dataclass(slots=True)
class _BlockTree:
    """Every distinct block in the order of its first appearance; a child comes after its parent."""

    block_tokens: int
    segment_tokens: int
    hashes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ends: bytearray = field(default_factory=bytearray)  # 1: a segment ends with this block
    has_child: bytearray = field(default_factory=bytearray)
    known: dict[int, int] = field(default_factory=dict)  # hash → block
    seed: int = field(default_factory=lambda: routing_seed("trace"))

    def add(self, parent: int, ids: Sequence[int]) -> list[int]:
        """Return the tree's blocks for a chain of ids that continues ``parent``."""
        known, value = self.known, self.seed if parent == _ROOT else self.hashes[parent]
        nodes = []
        for block in ids:
            value = xxhash.xxh3_64_intdigest(block.to_bytes(8, "little"), value)
            node = known.get(value)
            if node is None:
                node = known[value] = self._grow(parent, value)
            nodes.append(node)
            parent = node
        return nodes

    def _grow(self, parent: int, value: int) -> int:
        self.hashes.append(value)
        self.parents.append(parent)
        self.ends.append(0)
        self.has_child.append(0)
        if parent != _ROOT:
            self.ends[parent] |= self.has_child[parent]  # prompts part here
            self.has_child[parent] = 1
        return len(self.hashes) - 1

    def end(self, nodes: Sequence[int], full: int) -> None:
        """A request ends after its ``full`` blocks, and in the trace after ``nodes``."""
        for length in {full, len(nodes)} - {0}:
            self.ends[nodes[length - 1]] = 1

    def segments(self) -> tuple[list[int], list[int], list[int]]:
        """Return (segment of each block, first block of each segment, parent of each segment).

        A segment's blocks stand together: a chain that another row continues would have ended there.
        """
        most = max(1, self.segment_tokens // self.block_tokens)
        of_block: list[int] = []
        starts: list[int] = []
        parents: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == _ROOT or self.ends[parent] or node - starts[-1] >= most:
                starts.append(node)
                parents.append(_ROOT if parent == _ROOT else of_block[parent])
            of_block.append(len(starts) - 1)
        return of_block, starts, parents


def _assemble(
    header: TraceHeader, tree: _BlockTree, ended: list[tuple[TraceRequest, int]], early: Sequence[int]
) -> Workload:
    of_block, starts, parents = tree.segments()
    flat = np.array(tree.hashes, dtype=np.uint64)
    stops = [*starts, len(flat)][1:]
    tokens = [(stop - start) * header.block_tokens for start, stop in zip(starts, stops, strict=True)]
    end_tokens: list[int] = []
    for segment, parent in enumerate(parents):
        end_tokens.append(tokens[segment] + (0 if parent == _ROOT else end_tokens[parent]))
    for request, last in ended:
        path = []
        segment = _ROOT if last == _ROOT else of_block[last]
        while segment != _ROOT:
            path.append(segment)
            segment = parents[segment]
        request.path = tuple(reversed(path))
    requests = [request for request, _ in ended]
    if header.closed:
        _link_sessions(requests)
    else:
        requests.sort(key=lambda request: request.at_s)
        begin_s = requests[0].at_s  # traces may count from any moment, ours begin at 0
        for request in requests:
            request.at_s -= begin_s
    hashes = [flat[start:stop] for start, stop in zip(starts, stops, strict=True)]
    return Workload(header, requests, tokens, end_tokens, hashes, tuple(early))


def _link_sessions(requests: Iterable[TraceRequest]) -> None:
    """Let each request of a session follow the former one; contexts of a session run in line."""
    last: dict[int, TraceRequest] = {}
    for request in requests:
        before = last.get(request.session) if request.session >= 0 else None
        if before is not None:
            before.next, request.is_first = request, False
        last[request.session] = request


def infinite_hits(workload: Workload, order: Iterable[TraceRequest]) -> list[int]:
    """Return for each request the tokens that one cache that never forgets would have had when it came."""
    seen = bytearray(len(workload.segment_tokens))
    hits = []
    for request in order:
        known = next((n for n, segment in enumerate(request.path) if not seen[segment]), len(request.path))
        for segment in request.path[known:]:
            seen[segment] = 1
        hits.append(min(workload.prefix_tokens(request.path, known), request.prompt_tokens - 1))
    return hits
