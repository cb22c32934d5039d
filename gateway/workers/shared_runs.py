"""Runs that are the same in every worker: each tells the others what it linked and what was answered, and then goes on.

An agent's next step may come to another worker, and at the earliest after the last bytes of the answer to the one
before. These are sent after the others were told of the answer, and a worker hears everything it was told before it
links: so it knows that answer. Workers link one at a time (``turn``), hearing before and telling after within it, so
that steps which come to different workers at the very same moment know of each other too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.workers.mesh import Mesh
from gateway.workers.turn import Turn
from tracing.messages import MessageChain
from tracing.record import RunLink
from tracing.run_memory import MemoryOptions
from tracing.runs import RunEvidence, RunLinker, be_child

_MOST_LINKS = 1000
"""Of a long conversation so many of the newest messages are told, and the first one."""


class SharedRunLinker(RunLinker):
    """A linker that follows those of the other workers."""

    def __init__(self, mesh: Mesh, turn: Turn, options: MemoryOptions | None = None) -> None:
        super().__init__(options)
        self._mesh, self._turn = mesh, turn
        mesh.on("run linked", self._linked_there)
        mesh.on("run answered", self._answered_there)
        mesh.on("run unanswered", self._unanswered_there)

    def link(self, evidence: RunEvidence) -> RunLink:
        """See ``RunLinker``; knows what every worker told before."""
        with self._turn:
            self._mesh.catch_up()
            link = super().link(evidence)
            self._mesh.tell("run linked", _short(evidence), link)
        return link

    def answered(
        self,
        link: RunLink,
        request_id: str,
        tool_call_ids: Sequence[str] = (),
        message_chain: MessageChain = (),
        *,
        key_id: str,
        response_id: str | None = None,
        message: Mapping[str, object] | None = None,
    ) -> None:
        """See ``RunLinker``; when it returns the other workers can know it."""
        ids, tip = list(tool_call_ids), tuple(message_chain[-1:])
        named = {"key_id": key_id, "response_id": response_id, "message": message}
        super().answered(link, request_id, ids, message_chain, key_id=key_id, response_id=response_id, message=message)
        self._mesh.tell("run answered", (link, request_id, ids, tip), named)

    def unanswered(self, link: RunLink, request_id: str, *, key_id: str) -> None:
        """See ``RunLinker``."""
        super().unanswered(link, request_id, key_id=key_id)
        self._mesh.tell("run unanswered", link, request_id, key_id)

    def _linked_there(self, _: int, evidence: RunEvidence, link: RunLink) -> None:
        """Put the request where that worker put it. What different workers told may come in another order."""
        key = self._memory.of(evidence.key_id, evidence.at_ns)
        known = key.runs.get(link.run_id)
        steps, last = (0, None) if known is None else (known.steps, known.last)
        super().link(msgspec.structs.replace(evidence, explicit_run_id=link.run_id))
        run = key.runs.get(link.run_id)
        if run is not None:
            run.steps = max(steps, link.step)
            run.last = last if link.step < steps else run.last
            be_child(run, link.parent_run_id, link.parent_request_id, link.parent_call_id)

    def _answered_there(self, _: int, words: tuple[RunLink, str, list[str], MessageChain], named: Any) -> None:
        super().answered(*words, **named)

    def _unanswered_there(self, _: int, link: RunLink, request_id: str, key_id: str) -> None:
        super().unanswered(link, request_id, key_id=key_id)


def _short(evidence: RunEvidence) -> RunEvidence:
    """Return the evidence without the messages themselves, and without the middle of a very long chain."""
    chain = evidence.message_hashes
    if len(chain) > _MOST_LINKS:
        chain = (chain[0], *chain[-_MOST_LINKS:])
    return msgspec.structs.replace(evidence, messages=(), message_hashes=chain)
