"""How an engine is asked: what it is sent of a request, and how long its head and its body are waited for.

What became of it is an exception that says how far it came: ``ConnectFailed`` (nothing was sent), ``Lost`` (the engine
may have worked).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine_adapter.base import OPENAI_ENDPOINTS, Merge
from engine_adapter.base import Ask as EngineAsk
from engine_adapter.errors import AnswerTooLong, UpstreamBroken
from engine_adapter.http import UpstreamClient, UpstreamResponse
from engine_adapter.separation import merged
from gateway.draft import Draft
from gateway.errors import GatewayError, UpstreamTimeout, UpstreamUnusable
from gateway.instance import Instance, Timeouts
from gateway.protocols.base import Ask, Sent
from gateway.relay import RelayOptions, StreamWriter
from gateway.replies import Refused, Replies
from gateway.takeover import Plan
from tracing.spans import upstream_traceparent

LONG_BODY_BYTES = 1 << 17
"""Bodies longer than this are read and edited in a thread: other streams must not wait for them."""

_LOOK_S = 1.0
_PLAIN = {"content-type": "application/json", "accept-encoding": "identity"}
_CHAT_PATH = "/v1/chat/completions"


class Lost(Exception):
    """The engine got the request and failed then: it may have worked.

    ``refused``: what it answered, where that was an error of its own (5xx). ``in_stream``: its stream had begun.
    """

    def __init__(self, error: GatewayError, *, refused: Refused | None = None, in_stream: bool = False) -> None:
        super().__init__(error.message)
        self.error, self.refused, self.in_stream = error, refused, in_stream


@dataclass(frozen=True, slots=True)
class AttemptOptions:
    """Limits of one attempt, for instances that have none of their own."""

    relay: RelayOptions
    answer_cap_bytes: int = 64 << 20


class Asker:
    """Sends requests to instances, and waits for what comes first."""

    def __init__(self, client: UpstreamClient, replies: Replies, options: AttemptOptions) -> None:
        self._client, self._replies, self.options = client, replies, options
        self._limits: dict[Timeouts, RelayOptions] = {}

    async def sending(
        self,
        instance: Instance,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        plan: Plan | None,
        *,
        is_native: bool,
        more: Mapping[str, object] | None = None,
        streams: bool | None = None,
    ) -> Coroutine[Any, Any, UpstreamResponse]:
        """Return what sends the request; with a ``plan`` it goes on with another engine's answer.

        ``more``: members that part prefill from decode.
        """
        adapter = instance.spec.adapter
        if is_native and ask.endpoint not in OPENAI_ENDPOINTS:
            draft.counts_checked = False  # what prompt it makes of the request is its own affair
        sent = ask.native if is_native and ask.native is not None else ask.translated
        prompt = draft.prompt if draft.prompt is not None and not (is_native and ask.endpoint != "chat") else None
        input_ids = prompt.input_ids if prompt is not None and (plan is None or plan.keeps_input_ids) else None
        prepared = adapter.prepare(
            EngineAsk(
                request_id=draft.request_id,
                stream=ask.stream if streams is None else streams,
                model=None if ask.model == draft.served_model else draft.served_model,
                salt=salt if instance.capabilities.salt else None,
                endpoint=ask.endpoint if is_native else "chat",
                priority=_priority(instance, ask, draft),
                session=draft.run if instance.capabilities.session else None,
                input_ids=plan.input_ids if plan is not None and plan.input_ids is not None else input_ids,
                wants_output_ids=prompt is not None and prompt.answerable is not None,
                begun=plan.begun if plan is not None else None,
            )
        )
        members = prepared.members if prompt is None else {**prepared.members, **prompt.members}
        if plan is not None:
            members = {**members, **plan.members}
        if more is not None:
            parts = {
                n: merged(members.get(n), value) if isinstance(value, Merge) else value for n, value in more.items()
            }
            members = {**members, **parts}
        own = {**(draft.forwarded if is_native else {}), **instance.spec.headers, **prepared.headers}
        headers = {**_PLAIN, **_traced(draft), **own}
        url = f"{instance.spec.url}{draft.protocol.path if is_native else _CHAT_PATH}"
        body = await _edited(sent, members)
        return self._client.request("POST", url, headers, body, connect_timeout_s=instance.spec.timeouts.connect_s)

    async def head(
        self,
        send: Coroutine[Any, Any, UpstreamResponse],
        instance: Instance,
        limits: RelayOptions,
        writer: StreamWriter | None,
        draft: Draft,
    ) -> UpstreamResponse:
        """Wait for the answer's head, with heartbeats for a client that streams, while the instance is there.

        Raises ``ConnectFailed``, ``Lost``.
        """
        limit_s = min(limits.first_byte_timeout_s, limits.total_timeout_s)
        task, is_taken = asyncio.ensure_future(send), False
        try:
            async with asyncio.timeout(limit_s if limit_s < float("inf") else None):
                while True:
                    due_s = _LOOK_S if writer is None else min(writer.heartbeat_due_s(), _LOOK_S)
                    await asyncio.wait({task}, timeout=due_s)
                    if task.done():
                        is_taken = True
                        return _readable(task.result(), draft)
                    if instance.is_silent_for(limits.idle_timeout_s):
                        raise TimeoutError
                    if writer is not None and not writer.heartbeat_due_s():
                        await writer.start(self._replies.headers.of(draft))
                        await writer.heartbeat()
        except TimeoutError:
            draft.end_attempt(None, "timeout")
            error = UpstreamTimeout("the engine did not answer in time")
            raise Lost(error, in_stream=False) from None
        except UpstreamBroken:
            draft.end_attempt(None, "broken")
            raise Lost(UpstreamUnusable("the engine closed the connection without an answer")) from None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not is_taken and not task.cancelled() and task.exception() is None:
                task.result().close()  # it came at the very moment when nobody wanted it any more

    async def read(self, response: UpstreamResponse, limits: RelayOptions, limit_bytes: int, draft: Draft) -> bytes:
        """Return the rest of an answer that is not streamed. Raises ``Lost``, ``UpstreamUnusable``, and notes it."""
        limit_s = min(limits.first_byte_timeout_s, limits.total_timeout_s)
        try:
            async with asyncio.timeout(limit_s if limit_s < float("inf") else None):
                return await response.read_all(limit_bytes)
        except TimeoutError:
            draft.end_attempt(response.status, "timeout")
            raise Lost(UpstreamTimeout("the engine stopped in the middle of its answer")) from None
        except UpstreamBroken:
            draft.end_attempt(response.status, "broken")
            error = UpstreamUnusable("the engine's connection broke in the middle of its answer")
            raise Lost(error) from None
        except AnswerTooLong as error:
            draft.end_attempt(response.status, "answer_too_long")
            raise UpstreamUnusable(str(error), code="answer_too_long") from None

    def limits_of(self, instance: Instance) -> RelayOptions:
        """Return the limits that hold at this instance."""
        own = instance.spec.timeouts
        limits = self._limits.get(own)
        if limits is None:
            common = self.options.relay
            limits = self._limits[own] = replace(
                common,
                first_byte_timeout_s=own.first_byte_s or common.first_byte_timeout_s,
                idle_timeout_s=own.idle_s or common.idle_timeout_s,
                total_timeout_s=own.total_s or common.total_timeout_s,
            )
        return limits


def _readable(response: UpstreamResponse, draft: Draft) -> UpstreamResponse:
    """Return an answer that can be read as it comes. Raises ``Lost`` for a compressed one, which nobody asked for: its
    events are packed together, and its counts are hidden."""
    coding = response.headers.get("content-encoding")
    if coding is None or response.status != 200 or coding.strip().lower() in ("", "identity"):
        return response
    response.close()
    draft.end_attempt(response.status, "compressed")
    raise Lost(UpstreamUnusable("the engine answers compressed, which it was not asked for", code="engine_compressed"))


async def _edited(sent: Sent, members: Mapping[str, object | Merge]) -> bytes:
    """Return the body with these members set; long ones are edited in a thread."""
    if not members:
        return sent.body
    return await asyncio.to_thread(sent.edited, members) if len(sent.body) > LONG_BODY_BYTES else sent.edited(members)


def _priority(instance: Instance, ask: Ask, draft: Draft) -> int | None:
    """Return what an engine that orders its queue by priorities is told; what the client itself told it stands."""
    told = instance.capabilities.priority and "priority" not in ask.form.values
    return draft.priority.at_engines if told else None


def _traced(draft: Draft) -> dict[str, str]:
    """Return the trace that the engine is part of: the client's own, or our attempt in it where spans are exported."""
    if not draft.exports_spans:
        return {} if draft.traceparent is None else {"traceparent": draft.traceparent}
    run_id, number = None if draft.link is None else draft.link.run_id, len(draft.attempts) + 1
    told = upstream_traceparent(draft.request_id, number, draft.identity.tenant, run_id, draft.traceparent)
    return {"traceparent": told}
