"""``POST /keepwarm/v1/explain``: a request checked before it is sent: where it would hit, and where it first differs.

The body is the request itself, in the protocol of ``?endpoint=`` (chat, completions, responses, messages). Nothing is
sent to an engine, reserved, linked or billed. It is held against the newest requests of the key's latest runs, as far
as the watch still has them; the one that it shares most with comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from aiohttp import web

from gateway.bodies import whole_body
from gateway.diagnosis.compare import compare
from gateway.diagnosis.repairs import repair
from gateway.diagnosis.sections import Kept, keep
from gateway.diagnosis.watch import PromptWatch, Remembered
from gateway.dispatch import Dispatcher
from gateway.errors import BadRequest
from gateway.identity import KeyRing, effective_salt
from gateway.models import ModelDirectory
from gateway.prompts import PromptBook
from gateway.protocols.base import Ask, EndpointProtocol, model_of, scan_body
from gateway.reading import read_aside
from tracing.messages import message_chain
from tracing.record import Decision

_TIERS: Final = ("device", "host", "disk", "pool")


class Explainer:
    """The route."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        models: ModelDirectory,
        prompts: PromptBook,
        dispatcher: Dispatcher,
        compared: PromptWatch | None,
        protocols: Mapping[str, EndpointProtocol],
        body_cap_bytes: int,
    ) -> None:
        self._keys, self._models, self._prompts = keys, models, prompts
        self._dispatcher, self._compared, self._protocols = dispatcher, compared, protocols
        self._body_cap_bytes = body_cap_bytes

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/keepwarm/v1/explain", self._explain)]

    async def _explain(self, request: web.Request) -> web.Response:
        caller = self._keys.authenticate(request.headers)
        endpoint = request.query.get("endpoint", "chat")
        protocol = self._protocols.get(endpoint)
        if protocol is None:
            known = ", ".join(sorted(self._protocols))
            raise BadRequest(f"endpoint must be one of {known}", param="endpoint")
        sent = await read_aside(scan_body, await whole_body(request, self._body_cap_bytes))
        model = self._models.resolve(model_of(sent.form.values), caller)
        past = await protocol.past(sent.form, caller.identity.tenant)
        ask = await asyncio.to_thread(protocol.read, sent, past)
        chain = message_chain(ask.messages or ())
        prompt = await self._prompts.encode(
            model,
            ask,
            self._dispatcher.salt_of(model, effective_salt(caller, ask.cache_salt)),
            self._dispatcher.block_sizes(model),
            ask.body,
            cached_as=self._dispatcher.cached_as(model),
            rules=self._dispatcher.rules(self._models.options(model), ask),
            key_id=caller.identity.key_id,
            chain=chain,
        )
        decision = self._dispatcher.foresee(model, prompt, len(ask.body), self._dispatcher.unable(model, ask))
        against = await asyncio.to_thread(self._against, ask, caller.identity.key_id)
        told = {
            "model": model,
            "prompt_tokens": prompt.tokens if prompt is not None else None,
            "exact": prompt is not None and prompt.is_exact,
            **_where(decision),
            "against": against,
        }
        return web.json_response(told)

    def _against(self, ask: Ask, key_id: str) -> list[dict[str, object]]:
        if self._compared is None:
            return []
        self._compared.flush(1.0)
        latter = keep("", ask, None)
        found = [self._with(latter, former) for former in self._compared.latest(key_id)]
        return [told for _, told in sorted(found, key=lambda each: -each[0])]

    def _with(self, latter: Kept, former: Remembered) -> tuple[int, dict[str, object]]:
        assert self._compared is not None
        comparison, change = compare(former.kept, latter, shows_words=self._compared.shows_words)
        link = former.record.link
        assert link is not None
        told: dict[str, object] = {
            "run_id": link.run_id,
            "step": link.step,
            "request_id": former.record.request_id,
            "instance": former.record.instance,
            "comparison": comparison,
            "change": None if change is None else asdict(change),
            "repair": None if change is None else repair(change.kind, change),
        }
        return (len(former.kept.text) if change is None else change.kept_chars), told


def _where(decision: Decision | None) -> dict[str, object]:
    """Return what each instance would hit, by tier, and which would be asked."""
    if decision is None:
        return {"instance": None, "predicted_hit_tokens": None, "instances": []}
    return {
        "instance": decision.instance,
        "predicted_hit_tokens": decision.predicted_hit_tokens,
        "policy": decision.policy,
        "instances": [
            {
                "instance": each.instance,
                "hit_tokens": dict(zip(_TIERS, each.hit_tokens, strict=True)),
                "queued_tokens": each.queued_tokens,
                "expected_ttft_ms": round(each.expected_ttft_ns / 1e6, 3),
                "healthy": each.healthy,
            }
            for each in decision.candidates
        ],
    }
