"""A run as one tree: its steps, the tools between them, and the spans that its agent sent of its own. Pure.

Where an agent's own span tells of a tool call, it stands in the place of the inferred one. A step hangs under the span
that the agent's ``traceparent`` named; else under the call that began it (a sub-agent's steps); else it is a root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tracing.gaps import GapKind, gaps
from tracing.received import ReceivedSpan, Value
from tracing.record import RequestRecord
from tracing.retrieval import is_retrieval


class NodeKind(StrEnum):
    """What a node stands for."""

    STEP = "step"  # a request through the gateway
    TOOL = "tool"  # a tool call
    RETRIEVAL = "retrieval"  # a tool call or request that looks something up
    WAIT = "wait"  # nobody asked for anything
    SPAN = "span"  # what else the agent tells of itself


@dataclass(slots=True)
class Node:
    """One piece of a run. ``is_inferred``: from the gap between two steps, so an upper bound that calls share."""

    id: str
    parent_id: str | None
    kind: NodeKind
    name: str
    started_ns: int
    ended_ns: int
    is_inferred: bool = False
    request_id: str | None = None  # a step's own; a tool's or wait's: of the step before
    call_id: str | None = None
    run_id: str | None = None
    error: str | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)


def run_tree(records: Sequence[RequestRecord], spans: Iterable[ReceivedSpan] = ()) -> list[Node]:
    """Return the roots, in order of time. ``records``: of one run, or of a run and of those that it called for."""
    nodes = {span.span_id: _of_span(span) for span in spans}
    told = {span.call_id: span for span in nodes.values() if span.call_id is not None}
    called = {call.id: record for record in records for call in record.tool_calls if call.id}
    for record in records:
        step = _step(record)
        parent = (record.traceparent or "")[36:52]
        step.parent_id = parent if parent in nodes else None
        link = record.link
        if step.parent_id is None and link is not None and link.parent_call_id in told:
            step.parent_id = told[link.parent_call_id].id
        nodes[step.id] = step
    for gap in gaps(records):
        if gap.kind is GapKind.WAIT:
            id_ = f"wait:{gap.after_request_id}"
            above = nodes[gap.after_request_id].parent_id
            nodes[id_] = Node(
                id_, above, NodeKind.WAIT, "wait", gap.started_ns, gap.ended_ns, True, gap.after_request_id
            )
        for call in gap.calls:
            if call.id in told:
                continue
            id_ = f"tool:{gap.after_request_id}:{call.id}"
            nodes[id_] = Node(
                id_,
                gap.after_request_id,
                NodeKind.RETRIEVAL if is_retrieval(call.name) else NodeKind.TOOL,
                call.name,
                gap.started_ns,
                gap.ended_ns,
                True,
                gap.after_request_id,
                call.id,
            )
    inferred = {node.call_id: node for node in nodes.values() if node.call_id is not None}
    for node in nodes.values():
        if node.kind in (NodeKind.TOOL, NodeKind.RETRIEVAL) and node.parent_id not in nodes and node.call_id in called:
            node.parent_id = called[node.call_id].request_id
    for record in records:
        link = record.link
        if link is not None and link.parent_call_id in inferred:
            node = nodes[record.request_id]
            node.parent_id = node.parent_id or inferred[link.parent_call_id].id
    return _rooted(nodes)


def walk(roots: Iterable[Node], depth: int = 0) -> Iterable[tuple[int, Node]]:
    """Yield each node with its depth, parents first."""
    for node in roots:
        yield depth, node
        yield from walk(node.children, depth + 1)


def _rooted(nodes: dict[str, Node]) -> list[Node]:
    roots: list[Node] = []
    for node in nodes.values():
        parent = nodes.get(node.parent_id or "")
        if parent is None or _is_below(node, parent, nodes):
            roots.append(node)
        else:
            parent.children.append(node)
    for each in nodes.values():
        each.children.sort(key=lambda node: (node.started_ns, node.id))
    return sorted(roots, key=lambda node: (node.started_ns, node.id))


def _is_below(node: Node, above: Node, nodes: dict[str, Node]) -> bool:
    """Tell whether a node's parent hangs under the node itself: an agent may send anything."""
    seen: set[str] = set()
    at: Node | None = above
    while at is not None and at.id not in seen:
        if at is node:
            return True
        seen.add(at.id)
        at = nodes.get(at.parent_id or "")
    return at is not None


def _step(record: RequestRecord) -> Node:
    link = record.link
    kind = NodeKind.RETRIEVAL if record.endpoint in ("embeddings", "rerank") else NodeKind.STEP
    name = record.labels.get("step_name") or f"{record.endpoint} {record.model}".strip()
    ended = max(record.stamps.closed_ns, record.stamps.arrived_ns)
    return Node(
        record.request_id,
        None,
        kind,
        name,
        record.stamps.arrived_ns,
        ended,
        request_id=record.request_id,
        run_id=link.run_id if link is not None else None,
        error=None if record.outcome == "ok" else record.error or record.outcome.value,
    )


def _of_span(span: ReceivedSpan) -> Node:
    operation, kind = span.attributes.get("gen_ai.operation.name"), NodeKind.SPAN
    flavour = span.attributes.get("openinference.span.kind")
    if span.tool_call_id is not None or operation == "execute_tool" or flavour == "TOOL":
        kind = NodeKind.RETRIEVAL if is_retrieval(span.tool_name or span.name) else NodeKind.TOOL
    elif operation == "retrieval" or flavour in ("RETRIEVER", "RERANKER", "EMBEDDING"):
        kind = NodeKind.RETRIEVAL
    name = span.tool_name if kind is not NodeKind.SPAN and span.tool_name else span.name
    return Node(
        span.span_id,
        span.parent_id,
        kind,
        name,
        span.started_ns,
        span.ended_ns,
        call_id=span.tool_call_id,
        error=span.error,
        attributes=span.attributes,
    )
