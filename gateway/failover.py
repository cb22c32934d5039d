"""The one owner of a request's attempts: after each failure it decides whether another engine is asked, and what.

===========================================  ==================================================================
what became of an attempt                    what follows
===========================================  ==================================================================
no connection; the engine refused (429/503,  another instance: nothing ran
as its status or as a stream's first word)
broken or silent before any output, or 5xx   another instance only where policy lets inference be repeated
broken or silent behind some output          another instance goes on with the answer, where that can be done
refused otherwise (4xx)                      the client gets the engine's words
===========================================  ==================================================================

Every attempt counts towards one cap, whatever its reason, and stands in the request's record. No instance is asked
twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeAlias

from engine_adapter.errors import ConnectFailed
from gateway.asking import Lost
from gateway.attempt import Attempter
from gateway.dispatch import Dispatcher
from gateway.draft import Draft
from gateway.errors import NoInstance, OverTime, UpstreamUnusable
from gateway.instance import Instance
from gateway.prompts import PromptBook
from gateway.protocols.base import Ask
from gateway.relay import Reply
from gateway.replies import Refused, Replies
from gateway.separation import Separation
from gateway.takeover import Takeover

_log = logging.getLogger(__name__)
Trouble: TypeAlias = Refused | ConnectFailed | Lost


@dataclass(frozen=True, slots=True)
class FailoverOptions:
    """``attempts``: the cap, the first one included. ``repeats``: a request that may have run, and of which its client
    has got nothing, may run again elsewhere; an instance can say otherwise. ``continues``: streams outlive engines."""

    attempts: int = 3
    repeats: bool = False
    continues: bool = True


class Failover:
    """Answers requests by as many engines as it takes and may take."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        attempter: Attempter,
        prompts: PromptBook,
        replies: Replies,
        separation: Separation,
        options: FailoverOptions,
    ) -> None:
        self._dispatcher, self._attempter, self._prompts = dispatcher, attempter, prompts
        self._replies, self._separation, self._options = replies, separation, options

    async def answer(
        self, model: str, ask: Ask, salt: str | None, draft: Draft, reply: Reply, unable: frozenset[str]
    ) -> None:
        """Carry an answer, or the reason why there is none, to the client. ``unable``: instances that cannot give it.

        Raises ``GatewayError``, ``ClientGone``.
        """
        tried = frozenset[str]()
        trouble: Trouble | None = None
        takeover: Takeover | None = None
        for _ in range(self._options.attempts):
            cannot = unable if takeover is None else unable | self._dispatcher.without(model, takeover.can)
            run, seed = draft.run, ask.form.values.get("seed")
            pair = self._separation.route(model, draft.prompt, len(ask.body), tried | cannot)
            cannot |= self._separation.parts(model)
            route = (
                pair.decode
                if pair is not None
                else self._dispatcher.route(model, draft.prompt, len(ask.body), tried | cannot, run, seed)
            )
            if route is None:
                break
            known = route if pair is None else pair.prefill
            draft.watch, draft.routed_ns = known.watch, draft.now_ns()
            if draft.begun_hits is None:  # else it stays the one that those hits follow from
                draft.decision = known.decision
            draft.failed_at = route.instance.id
            plan = takeover.plan(route.instance) if takeover is not None else None
            try:
                await self._attempter.run(route, ask, salt, draft, reply, plan, None if pair is None else pair.prefill)
                return
            except (Refused, ConnectFailed) as error:
                if takeover is None and not (isinstance(trouble, Refused) and isinstance(error, ConnectFailed)):
                    trouble = error  # who is told to come again, and when, knows more than of an engine that is gone
            except Lost as lost:
                trouble, draft.has_lost = lost, True
                if not self._may_go_on(lost, draft, route.instance):
                    break
            finally:
                (pair or route).release()
                tried |= {draft.failed_at}
            if isinstance(trouble, Lost):
                takeover = await self._takeover(ask, draft, trouble)
        await self._no_answer(trouble, model, draft, reply)

    def _may_go_on(self, lost: Lost, draft: Draft, instance: Instance) -> bool:
        if isinstance(lost.error, OverTime):
            return False
        reader = draft.reader
        if reader is not None and reader.has_ended():
            return False
        if reader is not None and reader.seen.pieces:
            return self._options.continues
        own = instance.spec.repeats
        return self._options.repeats if own is None else own

    async def _takeover(self, ask: Ask, draft: Draft, lost: Lost) -> Takeover | None:
        """Return what another engine needs to go on; ``None`` where it simply begins anew."""
        reader = draft.reader
        if reader is None or not draft.stream:
            draft.reader = None
            return None
        if reader.seen.head is None and not reader.seen.pieces and draft.is_native:
            draft.reader = None  # the client has got no word of this stream
            return None
        if reader.seen.pieces:
            draft.keep_hits()
        reader.seen.go_on()
        _log.info("request %s lost its engine (%s); another is asked to go on", draft.request_id, lost.error.code)
        return await Takeover.of(ask, draft, self._prompts)

    async def _no_answer(self, trouble: Trouble | None, model: str, draft: Draft, reply: Reply) -> None:
        """Tell the client why no engine answered, or none could go on."""
        if isinstance(trouble, Refused):
            await self._replies.show_refusal(trouble, draft, reply)
        elif isinstance(trouble, Lost):
            if trouble.refused is not None and not trouble.in_stream:
                await self._replies.show_refusal(trouble.refused, draft, reply)
            elif draft.status == 200:
                await self._replies.show_break(trouble.error, draft, reply)
            else:
                raise trouble.error
        elif trouble is not None:
            after_s = self._dispatcher.retry_after_s(model)
            raise UpstreamUnusable("no engine could be reached", code="engine_unreachable", retry_after_s=after_s)
        else:
            raise NoInstance(f"no instance serves {model!r} now", retry_after_s=self._dispatcher.retry_after_s(model))
