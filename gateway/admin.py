"""What operators ask and tell: liveness, readiness, metrics, instances, and a run as JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from engine_adapter.errors import LaunchError
from gateway.access.roles import Right
from gateway.errors import BadRequest, GatewayError, NotFound
from gateway.fleet import Fleet
from gateway.identity import KeyRing
from gateway.instance import Instance
from gateway.told_loads import ToldLoad
from kvstore.page import Tier
from tracing.errors import AmbiguousRunError
from tracing.metrics import CONTENT_TYPE
from tracing.record import RequestRecord
from tracing.store import TraceStore

Restart = Callable[[], Awaitable[None]]
_LONGEST_DRAIN_S = 86_400


class InstanceBusy(GatewayError):
    """An instance did not come to rest within its limit; it is back in service."""

    status, kind, code = 409, "conflict_error", "instance_busy"


class Admin:
    """Routes for operators. ``restarts`` holds the instances that this gateway started itself."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        fleet: Fleet,
        traces: TraceStore,
        render_metrics: Callable[[], bytes],
        why_not_ready: Callable[[], str | None],
        restarts: Mapping[str, Restart],
        rest_limit_s: float = 60.0,
        end_run: Callable[[str, str], bool],
        drained: Callable[[str, bool], None] | None = None,
    ) -> None:
        """``end_run`` ends a key's run, and tells whether there is one. ``drained`` is told of each instance that is
        taken out or back, for other workers to do the same."""
        self._keys, self._fleet, self._traces = keys, fleet, traces
        self._render_metrics, self._why_not_ready, self._restarts = render_metrics, why_not_ready, restarts
        self._rest_limit_s, self._end, self._drained = rest_limit_s, end_run, drained

    def routes(self) -> list[web.RouteDef]:
        """Return the routes. Health and metrics need no key; they name instances and models, and nobody's requests."""
        root = "/keepwarm/v1"
        return [
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.get("/metrics", self._metrics),
            *(
                route
                for place in (root, "/admin/v1")
                for route in (
                    web.get(f"{place}/instances", self._instances),
                    web.post(f"{place}/instances/{{id}}/{{action:drain|resume|restart}}", self._act),
                )
            ),
            web.get(f"{root}/runs/{{run_id}}", self._run),
            web.post(f"{root}/runs/{{run_id}}/end", self._end_run),
        ]

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        why = self._why_not_ready()
        return web.json_response(
            {"status": "ready"} if why is None else {"status": why}, status=200 if why is None else 503
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        body = await asyncio.to_thread(self._render_metrics)  # the ledger is read
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE})

    async def _instances(self, request: web.Request) -> web.Response:
        self._keys.authorize_admin(request.headers)
        return web.json_response({"instances": [instance_facts(i) for i in self._fleet.instances.values()]})

    async def _act(self, request: web.Request) -> web.Response:
        self._keys.authorize_admin(request.headers)
        instance = self._fleet.instances.get(request.match_info["id"])
        if instance is None:
            raise NotFound("there is no such instance")
        action = request.match_info["action"]
        if action == "restart":
            await self._restart(instance)
        else:
            if action == "drain":
                instance.drain(_limit_of(request.query.get("limit_s")))
            else:
                instance.resume()
            if self._drained is not None:
                self._drained(instance.id, instance.is_draining)
        return web.json_response(instance_facts(instance))

    async def _restart(self, instance: Instance) -> None:
        restart = self._restarts.get(instance.id)
        if restart is None:
            raise BadRequest(f"{instance.id} was not started by this gateway, which so cannot restart it")
        was_draining, instance.is_draining = instance.is_draining, True
        try:
            async with asyncio.timeout(self._rest_limit_s):
                await instance.until_idle()
            instance.is_healthy, instance.trouble = False, "it is being restarted"
            await restart()
            instance.wake.set()
        except TimeoutError:
            raise InstanceBusy(f"{instance.id} still had requests after {self._rest_limit_s:g} s") from None
        except LaunchError as error:
            raise InstanceBusy(str(error)) from None
        finally:
            instance.is_draining = was_draining

    async def _run(self, request: web.Request) -> web.Response:
        caller = self._keys.authenticate(request.headers, Right.SEE_RUNS)
        tenant = request.query.get("tenant") if caller.is_admin else caller.identity.tenant
        try:
            records = await asyncio.to_thread(self._traces.run, request.match_info["run_id"], tenant)
        except AmbiguousRunError as error:
            raise BadRequest(str(error), param="tenant", code="ambiguous_run") from None
        if not records:
            raise NotFound("there is no such run")
        return web.Response(body=run_json(records), content_type="application/json")

    async def _end_run(self, request: web.Request) -> web.Response:
        """Whoever runs an agent says that it is done: an end of its own run, so the key that agents have is enough."""
        key_id = self._keys.authenticate(request.headers).identity.key_id
        if not self._end(key_id, request.match_info["run_id"]):
            raise NotFound("there is no such run of this key")
        return web.json_response({"status": "ended"})


def _limit_of(told: str | None) -> float | None:
    """Return after how long a drain breaks off what still runs. Raises ``BadRequest``."""
    if told is None:
        return None
    try:
        limit_s = float(told)
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s <= _LONGEST_DRAIN_S:
        raise BadRequest(f"limit_s must be a number of seconds, at most {_LONGEST_DRAIN_S}", param="limit_s")
    return limit_s


def run_json(records: list[RequestRecord]) -> bytes:
    """Return a run's records, and their sums, as JSON. ``amount_nano`` is null when a step has no price."""
    amounts = [record.charge.amount_nano for record in records]
    priced = [amount for amount in amounts if amount is not None]
    totals = {
        "requests": len(records),
        "prompt_tokens": sum(record.usage.prompt_tokens for record in records),
        "hit_tokens": sum(record.usage.hit_tokens for record in records),
        "output_tokens": sum(record.usage.output_tokens for record in records),
        "amount_nano": sum(priced) if len(priced) == len(amounts) else None,
    }
    return msgspec.json.encode({"totals": totals, "records": records})


def _told(told: ToldLoad) -> dict[str, object] | None:
    if told.load is None:
        return None
    load, age_s = told.load, time.monotonic() - told.told_s
    return {
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "used_share": load.used_share,
        "age_s": round(age_s, 1),
    }


def instance_facts(instance: Instance) -> dict[str, object]:
    """Return what there is to say of an instance."""
    facts, rates, knowledge, predicted = instance.facts, instance.rates, instance.knowledge, instance.predicted
    return {
        "id": instance.id,
        "url": instance.spec.url,
        "adapter": instance.spec.adapter.name,
        "models": list(instance.models),
        "healthy": instance.is_healthy,
        "draining": instance.is_draining,
        "breaker": instance.breaker.state.value,
        "role": instance.spec.role.value,
        "trouble": instance.trouble,
        "running": instance.load.running,
        "queued_tokens": instance.load.queued_tokens,
        "told_load": _told(instance.told_load),
        "events": None if knowledge is None else knowledge.value,
        "next_event_batch": None if instance.feed is None else instance.feed.next_sequence,
        "predicted": None
        if predicted is None
        else {
            "blocks": predicted.blocks,
            "block_size": predicted.block_size,
            "capacity_tokens": predicted.capacity_blocks * predicted.block_size,
        },
        "prediction": {
            basis: {
                "answers": score.answers,
                "exact_share": round(score.exact_share, 4),
                "mean_error_tokens": round(score.mean_error_tokens, 1),
                "mean_absolute_error_tokens": round(score.mean_absolute_error_tokens, 1),
            }
            for basis, score in instance.scores.items()
            if score.answers
        },
        "prefill_tokens_per_s": round(rates.prefill, 1),
        "block_size": facts.block_size if facts is not None else None,
        "capacity_tokens": facts.capacity_tokens if facts is not None else None,
        "pool": instance.spec.pool or (facts.pool if facts is not None else None),
        "tiers": list(facts.tiers) if facts is not None else [],
        "tiers_not_read": [Tier(tier).label for tier in instance.tier_use.refused()],
        "version": facts.version if facts is not None else None,
    }
