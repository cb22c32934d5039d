"""A prompt that one engine computes for another one, which decodes: before it is asked, or beside it.

vLLM's answers first, with what the other one needs; SGLang's two are asked at once and meet in a room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine_adapter.base import OPENAI_ENDPOINTS, Handover
from engine_adapter.errors import ConnectFailed
from engine_adapter.separation import bootstrap_members, prefill_members, transfer_answer, transfer_request
from gateway.asking import Asker, Lost
from gateway.dispatch import Route
from gateway.draft import Draft
from gateway.errors import UpstreamTimeout, UpstreamUnusable
from gateway.fleet import Fleet
from gateway.handover import PromptCounts
from gateway.protocols.base import Ask
from gateway.protocols.decode import json_object
from gateway.relay import StreamWriter
from gateway.replies import MAY_GO_ELSEWHERE, Refused
from gateway.takeover import Plan
from tracing.record import Attempt, AttemptRole


@dataclass(frozen=True, slots=True)
class Handed:
    """What the engine that decodes is told, and what the one that prefilled counted."""

    members: Mapping[str, object]
    counts: PromptCounts
    computing: asyncio.Future[Mapping[str, object]] | None = None  # the prompt, where it is not computed yet

    async def computed(self, writer: StreamWriter | None) -> None:
        """Wait until the prompt is computed, with heartbeats: before that there is no output, and no count of it.

        The counts are taken here: a callback of the other task may come after the answer was read.
        """
        while self.computing is not None and not self.computing.done():
            await asyncio.wait({self.computing}, timeout=None if writer is None else writer.heartbeat_due_s())
            if writer is not None and writer.has_begun and not writer.heartbeat_due_s():
                await writer.heartbeat()
        if self.computing is not None and not self.computing.cancelled() and self.computing.exception() is None:
            self.counts.told(self.computing.result())


class Prefiller:
    """Lets prompts be computed."""

    def __init__(self, asker: Asker, fleet: Fleet) -> None:
        self._asker, self._fleet = asker, fleet

    @asynccontextmanager
    async def prefilled(
        self,
        route: Route,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        writer: StreamWriter | None,
        plan: Plan | None,
    ) -> AsyncIterator[Handed]:
        """Let a prompt be computed: before the block, or beside it where both engines must be asked at once."""
        if route.instance.capabilities.handover is Handover.PARAMS:
            counts = PromptCounts(route.instance.spec.adapter)
            wanted: dict[str, object] = {"kv_transfer_params": transfer_request()}
            answer = await self._prefill(route, ask, salt, draft, writer, plan, wanted)
            counts.told(answer)
            told = transfer_answer(answer)
            yield Handed({} if told is None else {"kv_transfer_params": told}, counts)
            return
        room = bootstrap_members(route.instance.spec.url, route.instance.spec.bootstrap_port)
        beside = asyncio.ensure_future(self._prefill(route, ask, salt, draft, None, plan, room))
        handed = Handed(room, PromptCounts(route.instance.spec.adapter), beside)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as scope:

                def ended(task: asyncio.Future[Mapping[str, object]]) -> None:
                    if not task.cancelled() and task.exception() is not None and not scope.expired():
                        scope.reschedule(loop.time())  # nobody hands anything over: it is no use to wait

                beside.add_done_callback(ended)
                yield handed
        except TimeoutError:
            if not scope.expired():
                raise  # somebody else's
            failure = beside.exception() if beside.done() and not beside.cancelled() else None
            draft.end_attempt(None, "given_up")
            raise (
                failure if failure is not None else Lost(UpstreamTimeout("the engine did not answer in time"))
            ) from None
        finally:
            beside.cancel()
            await asyncio.wait({beside})

    async def _prefill(
        self,
        route: Route,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        writer: StreamWriter | None,
        plan: Plan | None,
        wanted: Mapping[str, object],
    ) -> Mapping[str, object]:
        """Let an engine compute the prompt; return its answer. Raises as ``run``; its attempt is noted."""
        instance, started_ns, error = route.instance, draft.now_ns(), "cut"
        limits, status = self._asker.limits_of(instance), None
        is_native = ask.endpoint in OPENAI_ENDPOINTS
        members = {**prefill_members(ask.form.values), **wanted}
        try:
            send = await self._asker.sending(
                instance, ask, salt, draft, plan, is_native=is_native, more=members, streams=False
            )
            response = await self._asker.head(send, instance, limits, writer, draft)
            try:
                status = response.status
                body = await self._asker.read(response, limits, self._asker.options.answer_cap_bytes, draft)
            finally:
                response.close()
            error = f"status_{status}"
            if status in MAY_GO_ELSEWHERE or 400 <= status < 500:
                raise Refused(status, body, response.headers)
            answer = json_object(body)
            if status != 200 or answer is None:
                raise Lost(UpstreamUnusable("the prompt was not computed", code="prefill_failed"))
            error = ""
            route.answered()
            self._fleet.request_answered(instance, route.ticket)
            return answer
        except ConnectFailed as failed:
            error, draft.failed_at = "connect_failed", instance.id
            self._fleet.connect_failed(instance, failed)
            raise
        except Refused:
            draft.failed_at, draft.is_native = instance.id, is_native
            raise
        except Lost as lost:
            error, draft.failed_at = error if error != "cut" else lost.error.code, instance.id
            self._fleet.request_failed(instance, route.ticket, lost.error)
            raise
        finally:
            draft.attempts.append(
                Attempt(instance.id, started_ns, draft.now_ns(), status, error or None, role=AttemptRole.PREFILL)
            )
