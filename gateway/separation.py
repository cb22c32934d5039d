"""Which two engines answer a request together where prompts and answers are computed apart.

The prefilling one is chosen by the model's policy, which knows who has which prefix; the decoding one by load alone:
it is handed the pages whatever it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_adapter.base import Handover
from gateway.dispatch import Dispatcher, Route
from gateway.fleet import Fleet
from gateway.instance import EngineRole, Instance
from gateway.prompt_job import Prompt


@dataclass(frozen=True, slots=True)
class Pair:
    """Two routes. ``release`` gives both back."""

    prefill: Route
    decode: Route

    def release(self) -> None:
        """The request is over. Once."""
        self.prefill.release()
        self.decode.release()


class Separation:
    """Chooses pairs. ``by_load`` chooses the decoding engine, over the same fleet."""

    def __init__(self, fleet: Fleet, by_prefix: Dispatcher, by_load: Dispatcher) -> None:
        self._fleet, self._by_prefix, self._by_load = fleet, by_prefix, by_load

    def parts(self, model: str) -> frozenset[str]:
        """Return the instances that answer nothing by themselves."""
        if not self._fleet.has_parts:
            return frozenset()
        return frozenset(i.id for i in self._fleet.serving(model) if i.spec.role is not EngineRole.BOTH)

    def route(self, model: str, prompt: Prompt | None, body_bytes: int, without: frozenset[str]) -> Pair | None:
        """Choose and reserve; ``None`` where there are no two that fit. Both hand over in the same way."""
        if not self._fleet.has_parts:
            return None
        instances = self._fleet.serving(model)
        for how in (Handover.BOOTSTRAP, Handover.PARAMS):
            able = {role: _of(instances, role, how) for role in (EngineRole.PREFILL, EngineRole.DECODE)}
            everyone = frozenset(instance.id for instance in instances)
            if not (able[EngineRole.PREFILL] - without and able[EngineRole.DECODE] - without):
                continue
            others = (everyone - able[EngineRole.DECODE]) | without
            decode = self._by_load.route(model, None, 0, others)
            if decode is None:
                continue
            others = (everyone - able[EngineRole.PREFILL]) | without
            prefill = self._by_prefix.route(model, prompt, body_bytes, others)
            if prefill is not None:
                return Pair(prefill, decode)
            decode.release()
        return None


def _of(instances: Sequence[Instance], role: EngineRole, how: Handover) -> frozenset[str]:
    return frozenset(i.id for i in instances if i.spec.role is role and i.capabilities.handover is how)
